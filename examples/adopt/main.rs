//! Two hosts in the forms of other engines. `prefix_cache` is in SGLang's form: this file keeps a free list of slots
//! beside it. `blocks` is a block manager in vLLM's form, which `chats` runs beside a plain one, `hash_blocks`. Both
//! serve chats that share a system prompt, and print how many of their tokens were cached. `cargo run --example adopt`

mod blocks;
mod chats;
mod hash_blocks;
mod manager;
mod prefix_cache;
mod serve;

use prefix_cache::PrefixCache;

const SLOTS: usize = 4096;
const PAGE_SIZE: usize = 16;
const CHATS: u32 = 20;
const TURNS: u32 = 6;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut cache = PrefixCache::new(SLOTS, PAGE_SIZE)?;
    let mut free: Vec<u32> = (0..SLOTS as u32).collect();
    // A system prompt of 100 tokens, then the chat's own tokens. Each turn adds 30 to the prompt of the one before.
    let token = |chat, i| if i < 100 { i } else { 1000 + 1000 * chat + i };
    let (mut cached, mut all) = (0, 0);
    for (turn, chat) in (0..TURNS).flat_map(|turn| (0..CHATS).map(move |chat| (turn, chat))) {
        let prompt: Vec<u32> = (0..100 + 30 * (turn + 1)).map(|i| token(chat, i)).collect();
        let mut slots = Vec::new();
        // The model computes the last token in any case, to sample the next one.
        let hit = cache.match_prefix(&prompt[..prompt.len() - 1], &mut slots);
        cache.lock_handle(hit, false)?;
        let wanted = prompt.len().next_multiple_of(PAGE_SIZE) - slots.len();
        cache.evict(wanted.saturating_sub(free.len()), &mut free)?;
        slots.extend(free.drain(..wanted));
        // Here the model computes K and V of the tokens after the hit.
        let known = cache.insert_prefix(&prompt, &slots)?;
        let whole = prompt.len() / PAGE_SIZE * PAGE_SIZE;
        free.extend_from_slice(&slots[hit.cached_len..known]); // computed twice
        free.extend_from_slice(&slots[whole..]); // a part of a page is not cached
        cache.lock_handle(hit, true)?;
        (cached, all) = (cached + hit.cached_len, all + prompt.len());
    }
    cache.check_integrity();
    let size = cache.size_info();
    println!("{cached} of {all} prompt tokens were cached");
    println!("{} of {SLOTS} slots are in the cache, {} evictable", size.total_size(), size.evictable_size);
    assert_eq!(size.protected_size, 0, "no request runs");
    cache.reset(&mut free);
    assert_eq!(free.len(), SLOTS, "every slot is free again");
    chats::run();
    Ok(())
}
