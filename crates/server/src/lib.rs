//! An OpenAI server and a command line over `kvarena-host`.
//!
//! ```text
//! args, setup, work   the command line, and its conversion to a model, an engine's config and requests
//! built_in            the model that the program contains
//! chat, demo, output  the program on a terminal
//! stores              stores of K and V behind the serving loop
//! http                OpenAI's API around the serving loop
//! gpu                 set-up, reports and benches of the host on a GPU (feature `cuda`)
//! ```

#![deny(missing_docs, unsafe_code)]

pub mod args;
pub mod built_in;
pub mod chat;
pub mod demo;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod http;
pub mod output;
pub mod setup;
pub mod stores;
pub mod work;
