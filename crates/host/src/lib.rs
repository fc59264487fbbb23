//! A small LLM host on `kvarena`: Llama, Qwen3, DeepSeek V3 and gpt-oss from safetensors, served with continuous batching.
//!
//! ```text
//! error, clock, histogram           what can go wrong, where the time goes
//! config, rope, checkpoint          a model directory's files
//! matrix, ops, linear               products, what stands between them, projections
//! latent, experts, model            the forward pass; knows neither pages nor sequences
//! contiguous                        the same without pages, for checking
//! sample, shaping, text, template   from logits to tokens, from tokens to text
//! request, stream, draft            what is asked for, each answer as it grows, guesses at how it goes on
//! runner, cpu, gpu                  who computes steps: the seam, the CPU, a GPU (feature `cuda`)
//! server, tally                     the serving loop, and what it did
//! http                              OpenAI's API around that loop
//! args, setup, output, chat         the program around it
//! calibrate                         static scales of fp8 pools
//! sparse                            reading some of a long context
//! ```

#![deny(missing_docs, unsafe_code)]

pub mod args;
pub mod calibrate;
pub mod chat;
pub mod checkpoint;
pub mod clock;
pub mod config;
pub mod contiguous;
pub mod cpu;
pub mod demo;
pub mod draft;
pub mod error;
pub mod experts;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod histogram;
pub mod http;
pub mod latent;
pub mod linear;
pub mod matrix;
pub mod model;
pub mod ops;
pub mod output;
pub mod request;
pub mod rope;
pub mod runner;
pub mod sample;
pub mod server;
pub mod setup;
pub mod shaping;
pub mod sparse;
pub mod stream;
pub mod tally;
pub mod template;
pub mod text;
