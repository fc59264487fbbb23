//! A small LLM host on `kvarena`: Llama and Qwen3 from safetensors, served with continuous batching.
//!
//! ```text
//! error, clock                      what can go wrong, where the time goes
//! config, rope, checkpoint          a model directory's files
//! matrix, ops, model                the forward pass; knows neither pages nor sequences
//! sample                            from logits to tokens
//! ```

#![deny(missing_docs, unsafe_code)]

pub mod checkpoint;
pub mod clock;
pub mod config;
pub mod error;
pub mod matrix;
pub mod model;
pub mod ops;
pub mod rope;
pub mod sample;
