//! Steps of 64 running chats through a block manager of `examples/adopt`, without a model. Chats begin with one of 32
//! system prompts of 1,024 tokens and go on with up to 1,024 tokens of one of 256 users. Answers have 16 to 200 tokens.

use kvarena::testkit::rng::Rng;

use super::blocks::EngineBlocks;
use super::hash_blocks::HashBlocks;
use super::manager::BlockManager;
use super::serve::{Request, Scheduler};

const RUNNING: usize = 64;
const TOKENS: usize = 192_000;
const MAX_LEN: usize = 2304;
/// Steps before the measured ones: about four for each request that runs at once.
const WARM: usize = 256;

pub struct ManagedChats<M> {
    scheduler: Scheduler<M>,
    rng: Rng,
    next: u64,
}

impl ManagedChats<EngineBlocks> {
    pub fn engine(page_size: u32) -> Self {
        let blocks = TOKENS as u32 / page_size + 1;
        Self::new(EngineBlocks::new(blocks, page_size, RUNNING as u32, MAX_LEN as u32), page_size as usize)
    }
}

impl ManagedChats<HashBlocks> {
    pub fn hash(page_size: u32) -> Self {
        Self::new(HashBlocks::new(TOKENS / page_size as usize + 1, page_size as usize), page_size as usize)
    }
}

impl<M: BlockManager> ManagedChats<M> {
    fn new(manager: M, page_size: usize) -> Self {
        let scheduler = Scheduler::new(manager, RUNNING, 2048, MAX_LEN / page_size);
        let mut chats = Self { scheduler, rng: Rng::new(1), next: 0 };
        for _ in 0..WARM {
            chats.arrive();
            chats.step();
        }
        chats
    }

    /// Keeps more chats waiting than a step admits.
    pub fn arrive(&mut self) {
        self.scheduler.finished.clear();
        while self.scheduler.waiting.len() < RUNNING {
            let user = self.rng.below(256) as u32;
            let system = (0..1024).map(|i| user % 32 * 10_000 + i);
            let own = (0..self.rng.below(1024) as u32).map(|i| 5_000_000 + user * 10_000 + i);
            let prompt = system.chain(own).chain([9_000_000 + self.next as u32]).collect();
            self.scheduler.waiting.push_back(Request::new(self.next, prompt, self.rng.within(16, 200) as usize));
            self.next += 1;
        }
    }

    /// Runs a step: the scheduler and all calls of the manager.
    pub fn step(&mut self) {
        self.scheduler.step(&mut |step, sampled| sampled.extend(step.batch.iter().map(|_| 7)));
    }

    /// Returns the steps, the prompt tokens, the cached ones, and the preemptions until now.
    pub fn counts(&self) -> [usize; 4] {
        let counts = self.scheduler.counts;
        [counts.steps, counts.prompt_tokens, counts.hit_tokens, counts.preemptions]
    }
}
