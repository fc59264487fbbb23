//! Measures stores: questions for names, the CPU time of reads with checks, and the time from a restart to a warm
//! prefix beside `cat` of the same files.
//!
//! usage: `speed DIR [REDIS_URL]`: DIR is an empty folder on the disk to measure, or on a tmpfs.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvarena::hash::Hashing;
use kvarena::id::{Namespace, TokenId};
use kvarena::*;
use kvarena_tiers::check::Secret;
use kvarena_tiers::disk::{Cache, Disk, DiskOptions};
use kvarena_tiers::name::{Fingerprint, Name, Space};
use kvarena_tiers::record::{PageChecks, Record};
use kvarena_tiers::store::{Buffers, Got, Store};
use kvarena_tiers::tier::{StoreOptions, Tier, TierOptions};
use rustix::time::{ClockId, clock_gettime};

type Fallible<T = ()> = Result<T, Box<dyn Error>>;

/// Qwen3-8B in bf16: 2.25 MiB a page of 16 tokens.
const PAGE_BYTES: usize = 36 * 2 * 8 * 128 * 16 * 2;
const RECORDS: u32 = 64;
const ROUNDS: usize = 9;
const FINGERPRINT: Fingerprint = Fingerprint([7; 32]);

fn main() -> Fallible {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [folder, redis @ ..] = &arguments[..] else { return Err("usage: speed DIR [REDIS_URL]".into()) };
    let open = |name| Disk::open(DiskOptions::new(Path::new(folder).join(name), 1 << 40));
    let disk = open("reads")?;
    measure("disk", &disk)?;
    #[cfg(feature = "redis")]
    if let [url] = redis {
        measure("Redis", &kvarena_tiers::redis::Redis::new(url, None)?)?;
    }
    let _ = redis;
    restart(&Path::new(folder).join("restart"))
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns the CPU time of the process in seconds.
fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn name(number: u32) -> Name {
    let mut key = [0; 32];
    key[..4].copy_from_slice(&number.wrapping_mul(0x9e37_79b9).to_le_bytes());
    key[4..8].copy_from_slice(&number.to_le_bytes());
    Name::new(&FINGERPRINT, Space::default(), key, 0)
}

fn measure(of: &str, store: &dyn Store) -> Fallible {
    let names: Vec<_> = (0..2048).map(name).collect();
    for name in &names[..1024] {
        store.put(name, &[0; 4096], &[&[1; 4096]])?;
    }
    for (what, names) in [("stored", names[..1024].repeat(2)), ("absent", names[1024..].repeat(2))] {
        let time = |_| -> Fallible<f64> {
            let begin = Instant::now();
            store.have(&names)?;
            Ok(begin.elapsed().as_secs_f64() * 1e3)
        };
        println!("{of}: have of 2,048 {what} names: {:.2} ms", median((0..ROUNDS).map(time).collect::<Fallible<_>>()?));
    }
    store.remove(&names)?;
    for (check, secret) in [("XXH3-128", None), ("keyed BLAKE3", Some(Secret::new([1; 32])))] {
        let [checked, plain, copy] = reads(store, secret.as_ref())?;
        println!(
            "{of}: get with {check}: {checked:.3} ns of CPU a byte; without its check {plain:.3}; memcpy {copy:.3}"
        );
    }
    Ok(())
}

/// Returns the CPU time of reads with checks, of reads without checks, and of copies in memory, in ns a byte. Every
/// record has its own page, which was written before, as the pages of an engine have.
fn reads(store: &dyn Store, secret: Option<&Secret>) -> Fallible<[f64; 3]> {
    let tokens: Vec<_> = (0..16).map(TokenId::new).collect();
    let page: Vec<u8> = (0..PAGE_BYTES).map(|at| (at * 7 % 251) as u8).collect();
    let (mut pages, copied) = (vec![page.clone(); RECORDS as usize], vec![page.clone(); RECORDS as usize]);
    let record = |number| Record {
        fingerprint: FINGERPRINT,
        space: Space::default(),
        group: 0,
        page_size: 16,
        first: 0,
        pages: 1,
        page_bytes: PAGE_BYTES as u32,
        parent: None,
        key: name(number).key,
        tokens: &tokens,
    };
    for number in 0..RECORDS {
        store.put(&name(number), &record(number).write_head(&[&page], secret), &[&page])?;
    }
    let mut head = vec![0; record(0).head_bytes()];
    let mut time = |what: usize| -> Fallible<f64> {
        let begin = cpu();
        for (number, page) in (0..RECORDS).zip(&mut pages) {
            let (name, mut checks) = (name(number), PageChecks::new(PAGE_BYTES, secret));
            let mut check = |piece: &[u8]| checks.update(piece);
            let seen: &mut dyn FnMut(&[u8]) = if what == 0 { &mut check } else { &mut |_| () };
            let into = &mut Buffers { first: 0, of: 1, head: &mut head, pages: &mut [&mut page[..]], seen };
            match what {
                0 => {
                    assert_eq!(store.get(&name, into)?, Got::Read);
                    let checked = record(number).check_head(&head, secret);
                    checked.and_then(|()| checks.compare(&head, 0, 1)).expect("intact");
                }
                1 => assert_eq!(store.get(&name, into)?, Got::Read),
                _ => page.copy_from_slice(&copied[number as usize]),
            }
        }
        Ok((cpu() - begin) * 1e9 / (f64::from(RECORDS) * PAGE_BYTES as f64))
    };
    // The machine's speed changes, so the cases alternate.
    let mut costs = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        for (what, costs) in costs.iter_mut().enumerate() {
            costs.push(time(what)?);
        }
    }
    let costs = costs.map(median);
    store.remove(&(0..RECORDS).map(name).collect::<Vec<_>>())?;
    Ok(costs)
}

/// An engine, and its tier over a folder. The receiver gets a message when the tier has work.
fn host(folder: &Path) -> Fallible<(Engine<Cpu>, Tier<Cpu>, std::sync::mpsc::Receiver<()>)> {
    let (shape, dtype, capacity) = (KvShape::heads(8, 128), KvDtype::Bf16, Capacity::Pages(RECORDS + 2));
    let swap_pages = RECORDS + 2;
    let pool = PoolConfig { layers: 36, shape, dtype, capacity, swap_pages, stage_pages: 16, ..PoolConfig::default() };
    let config = EngineConfig { hashing: Some(Hashing::SglangSha256), ..pool.into() };
    let engine = Engine::new(config, CpuOptions::default())?;
    let disk = Arc::new(Disk::open(DiskOptions::new(folder, 1 << 40))?);
    let (sender, woken) = channel();
    let options = TierOptions {
        deadline: Duration::from_secs(60),
        wake: Arc::new(move || sender.send(()).unwrap_or(())),
        ..TierOptions::new(vec![FINGERPRINT], vec![StoreOptions::new("disk", disk)])
    };
    let tier = Tier::new(options, &engine)?;
    Ok((engine, tier, woken))
}

fn restart(folder: &Path) -> Fallible {
    let prompt: Vec<_> = (0..RECORDS * 16 + 1).map(TokenId::new).collect();
    let (mut engine, mut tier, _) = host(folder)?;
    let seq = engine.admit(Namespace::default(), &prompt, 0)?;
    let mut scratch = StepScratch::new();
    let step = engine.plan_batch(&mut scratch, &[Extend { seq, len: prompt.len() as u32 }])?.step();
    engine.commit(step)?;
    engine.complete(step)?;
    engine.finish(seq)?;
    assert!(tier.flush(&mut engine, Duration::from_secs(600))?);
    drop((engine, tier));
    let mut files: Vec<PathBuf> = Vec::new();
    Cache::open(folder)?.list(|file| files.push(folder.join(file.name.to_string())))?;
    let (mut fresh, mut warm, mut cat) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        assert!(Command::new("cat").args(&files).stdout(Stdio::null()).status()?.success());
        cat.push(begin.elapsed().as_secs_f64());
        let (mut engine, mut tier, woken) = host(folder)?;
        let mut find = |engine: &mut Engine<Cpu>| -> Fallible<f64> {
            let begin = Instant::now();
            tier.find(1, engine, Namespace::default(), &prompt);
            let mut found = None;
            while found.is_none() {
                woken.recv()?;
                tier.turn(engine, |_, pages| found = Some(pages))?;
            }
            assert_eq!(found, Some(RECORDS));
            Ok(begin.elapsed().as_secs_f64())
        };
        // The first writes to the engine's memory are page faults, which the pinned memory of GPUs does not have.
        fresh.push(find(&mut engine)?);
        engine.reset();
        warm.push(find(&mut engine)?);
    }
    let bytes = RECORDS as usize * PAGE_BYTES;
    let [fresh, warm, cat] = [fresh, warm, cat].map(|times| bytes as f64 / median(times) / 1e9);
    println!("restart: {bytes} bytes warm at {warm:.2} GB/s, {fresh:.2} into fresh memory; cat {cat:.2}");
    Ok(())
}
