//! Measures how much of attention's weight sparse reads cover, over random K with the structure of trained models.
//!
//! ```sh
//! cargo run --release --manifest-path crates/Cargo.toml -p kvarena-host --example recall
//! ```
//!
//! A few channels of a head contribute most to its dot products, and in some channels K has a mean far from 0. Tokens
//! form runs of one topic, and the query heads of a kv head match the tokens of one or two topics. The prompt
//! determines the label channels; the program measures recall on the queries after the prompt. To measure a model,
//! run `kvarena-server --sparse K,CHANNELS --recall`.

use std::error::Error;

use kvarena::{
    Attend, Backend, Capacity, CpuOptions, Engine, EngineConfig, Extend, KvDtype, KvShape, LabelChannels, LayerId,
    Namespace, PoolConfig, StepScratch, TokenId,
};
use kvarena_host::sample::splitmix;
use kvarena_host::sparse::channels::Measured;
use kvarena_host::sparse::reader::Reader;
use kvarena_host::sparse::recall::Recall;

const KV_HEADS: usize = 2;
const GROUP: usize = 4;
const HEAD_DIM: usize = 128;
const PROMPT: usize = 4096;
const QUERIES: usize = 32;
const TOPICS: u64 = 64;
/// Standard deviation of the noise; the elements of a topic's vector have 1.
const NOISE: f32 = 0.7;

fn main() -> Result<(), Box<dyn Error>> {
    let data = Data::new(7);
    println!("a prompt of {PROMPT} tokens, heads of {HEAD_DIM}, {GROUP} query heads a kv head, {QUERIES} queries");
    println!("channels   K: mean and least recall, the share of all weight on the lists and on the best lists");
    for channels in [8, 16, 32, 64, 128] {
        let labels = data.measured().best(channels)?;
        for top in [64, 256, 1024] {
            let recall = data.recall(labels.clone(), top)?;
            let ([mean, held, best], least) = (recall.means(), recall.least);
            println!("{channels:8} {top:4}: {mean:.3} {least:.3}, {held:.3} {best:.3}");
        }
    }
    Ok(())
}

/// q, `[tokens, q_heads, head_dim]`, and k, `[tokens, kv_heads, head_dim]`.
struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
}

impl Data {
    fn new(seed: u64) -> Self {
        let mut random = Random { state: seed };
        let heads: Vec<Head> = (0..KV_HEADS).map(|_| Head::new(&mut random)).collect();
        let (mut q, mut k, mut topic) = (Vec::new(), Vec::new(), 0);
        for _ in 0..PROMPT + QUERIES {
            if random.below(16) == 0 {
                topic = random.below(TOPICS);
            }
            let queried = [random.below(TOPICS), random.below(TOPICS)];
            for head in &heads {
                k.extend(head.key(topic, &mut random));
                for i in 0..GROUP {
                    q.extend(head.query(queried[i % 2], &mut random));
                }
            }
        }
        Self { q, k }
    }

    /// Measures the importance of channels over the prompt.
    fn measured(&self) -> Measured {
        let mut measured = Measured::of(1, KV_HEADS, HEAD_DIM);
        let width = PROMPT * KV_HEADS * HEAD_DIM;
        measured.measure(0, &self.q[..GROUP * width], &self.k[..width]);
        measured
    }

    /// Measures the recall of the queries after the prompt.
    fn recall(&self, labels: LabelChannels, top: u32) -> Result<Recall, Box<dyn Error>> {
        let tokens = (PROMPT + QUERIES) as u32;
        let pool = PoolConfig {
            shape: KvShape::heads(KV_HEADS as u32, HEAD_DIM as u32),
            dtype: KvDtype::Bf16,
            capacity: Capacity::Pages(tokens.div_ceil(16)),
            label_channels: labels.channels(),
            ..PoolConfig::default()
        };
        let config = EngineConfig { max_sequence_len: tokens, ..EngineConfig::from(pool) };
        let options = CpuOptions { labels: Some(labels), ..CpuOptions::default() };
        let mut engine = Engine::new(config, options)?;
        let mut reader = Reader::new(top, Some(Recall::new(engine.shape().table)));
        let prompt: Vec<TokenId> = (0..tokens).map(TokenId::new).collect();
        let seq = engine.admit(Namespace::default(), &prompt, 0)?;
        let (mut scratch, layer) = (StepScratch::new(), LayerId::new(0));
        let attend = Attend::new((KV_HEADS * GROUP) as u32, HEAD_DIM as u32);
        let width = KV_HEADS * HEAD_DIM;
        let mut out = vec![0.0; GROUP * width];
        let mut done = 0;
        while done < tokens {
            let len = if done == 0 { PROMPT as u32 } else { 1 };
            let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len }])?;
            let rows = done as usize * width..(done + len) as usize * width;
            let k = &self.k[rows.clone()];
            engine.backend_mut().store_cache(&plan, layer, k.into(), k.into())?;
            if len == 1 {
                let q = &self.q[GROUP * rows.start..GROUP * rows.end];
                let call = (&plan, layer);
                reader.attend(engine.backend_mut(), call, &attend, (q, None), &mut out)?;
            }
            let step = plan.step();
            engine.commit(step)?;
            engine.complete(step)?;
            done += len;
        }
        Ok(reader.recall().expect("the reader measures").clone())
    }
}

/// Distribution of a kv head's channels.
struct Head {
    /// Factor of each channel of q and of k: `4 / sqrt(r)` for the channel of rank r.
    widths: Vec<f32>,
    /// Mean of each channel of a key; 0 for most channels.
    means: Vec<f32>,
    /// `[topics, head_dim]`
    topics: Vec<f32>,
}

impl Head {
    fn new(random: &mut Random) -> Self {
        let mut ranks: Vec<usize> = (1..=HEAD_DIM).collect();
        for i in 0..HEAD_DIM {
            ranks.swap(i, random.below(HEAD_DIM as u64) as usize);
        }
        Self {
            widths: ranks.iter().map(|&rank| 4.0 / (rank as f32).sqrt()).collect(),
            means: ranks.iter().map(|&rank| if rank % 32 == 2 { 8.0 } else { 0.0 }).collect(),
            topics: (0..TOPICS as usize * HEAD_DIM).map(|_| random.normal()).collect(),
        }
    }

    fn key(&self, topic: u64, random: &mut Random) -> Vec<f32> {
        let query = self.query(topic, random);
        query.iter().zip(&self.means).map(|(x, mean)| x + mean).collect()
    }

    fn query(&self, topic: u64, random: &mut Random) -> Vec<f32> {
        let topic = &self.topics[topic as usize * HEAD_DIM..][..HEAD_DIM];
        let near = topic.iter().zip(&self.widths);
        near.map(|(x, width)| width * (x + NOISE * random.normal())).collect()
    }
}

struct Random {
    state: u64,
}

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        splitmix(&mut self.state) % end
    }

    /// Returns a number of mean 0 and standard deviation 1: the sum of twelve uniform numbers, minus 6.
    fn normal(&mut self) -> f32 {
        let unit = |state: &mut u64| (splitmix(state) >> 40) as f32 / (1 << 24) as f32;
        (0..12).map(|_| unit(&mut self.state)).sum::<f32>() - 6.0
    }
}
