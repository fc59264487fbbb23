//! A small LLM host on `kvarena`, with continuous batching. It runs Llama 3 and 4, Qwen3, DeepSeek V3, gpt-oss, Gemma 3
//! and Gemma 4 from safetensors, and Llama and Gemma 3 from GGUF.
//!
//! ```text
//! error, clock, histogram           errors; times of a run
//! files, fields, family             a model's files; typed look-ups in config.json; the model's family
//! config, gemma, rope               the model's shape; fields of Gemma; rotary embedding
//! generation                        sampling parameters of generation_config.json
//! source, checkpoint, gguf          a model's tensors: random, from safetensors or from GGUF
//! quantised                         published formats of 8 and 4 bits in safetensors
//! matrix, ops, linear               matrix products, element-wise operations, projections
//! latent, nope, delta, experts      latent attention, Llama 4's positions, layers with a state, mixtures of experts
//! model                             the forward pass; the caller stores K and V and computes attention
//! sample, shaping                   from logits to tokens
//! template, coding, text, decoder   from messages to tokens, from tokens to text
//! request, stream, draft            requests; the growing answers; drafts of their next tokens
//! runner, cpu, gpu                  the interface `Runner`, which computes steps; the CPU; a GPU (feature `cuda`)
//! server, tally, memory             the serving loop; its counters; the memory that a sequence needs
//! stores                            stores of K and V behind the loop
//! calibrate                         static scales of fp8 pools
//! sparse                            sparse reads of a long context
//! ```
//!
//! `crates/server` adds the command line and the HTTP API.

#![deny(missing_docs, unsafe_code)]

pub mod calibrate;
pub mod checkpoint;
pub mod clock;
pub mod coding;
pub mod config;
pub mod cpu;
pub mod decoder;
pub mod delta;
pub mod draft;
pub mod error;
pub mod experts;
pub mod family;
pub mod fields;
pub mod files;
pub mod gemma;
pub mod generation;
pub mod gguf;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod histogram;
pub mod latent;
pub mod linear;
pub mod matrix;
pub mod memory;
pub mod model;
pub mod model_files;
pub mod nope;
pub mod ops;
pub mod quantised;
pub mod request;
pub mod rope;
pub mod runner;
pub mod sample;
pub mod server;
pub mod shaping;
pub mod source;
pub mod sparse;
pub mod stores;
pub mod stream;
pub mod tally;
pub mod template;
pub mod text;
