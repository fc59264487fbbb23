//! Stores of K and V behind the server: `--cache-dir`, `--cache-url` and `--cache-exec`.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use kvarena::EngineConfig;
use kvarena::hash::Hashing;
use kvarena_host::error::{Error, Result};
use kvarena_host::runner::Runner;
use kvarena_host::server::Server;
use kvarena_host::stores::TierStores;
use kvarena_tiers::check::Secret;
use kvarena_tiers::child::Child;
use kvarena_tiers::disk::{Disk, DiskOptions};
use kvarena_tiers::identity::Identity;
use kvarena_tiers::objects::Objects;
use kvarena_tiers::redis::Redis;
use kvarena_tiers::store::Store;
use kvarena_tiers::tier::{RankMemory, StoreOptions, Tier, TierOptions};
use kvarena_tiers::weights;

use crate::args::{Args, BackendName, CacheOptions, Role, Switch};
use crate::setup;

/// Recipe of page hashes for stores.
const HASHING: Hashing = Hashing::SglangSha256;
/// Least and largest number of swap pages through which records of device pages pass. Few of them make the store wait
/// for copies, and the copies for the store.
const STAGE_PAGES: [u32; 2] = [64, 256];
/// Endings of a model's files.
const EXTENSIONS: &[&str] = &["json", "safetensors"];
/// Memory of a record of a child, at most.
const CHILD_RECORD: u64 = 64 << 20;

impl CacheOptions {
    /// Returns whether the command line names a store.
    pub fn is_given(&self) -> bool {
        self.cache_dir.is_some() || self.is_remote()
    }

    fn is_remote(&self) -> bool {
        self.cache_url.is_some() || self.cache_exec.is_some()
    }

    /// Changes an engine's config for stores, if the command line names one.
    ///
    /// # Errors
    /// Options that exclude stores.
    pub fn config(&self, args: &Args, config: &mut EngineConfig) -> Result<()> {
        if self.role == Role::Prefill && !(self.is_given() && self.cache_write == Switch::On) {
            return Err(Error::request("--role prefill needs a store that it writes, such as --cache-dir"));
        }
        if !self.is_given() {
            return Ok(());
        }
        if !(0.0..=3600.0).contains(&self.cache_wait) {
            return Err(Error::request(format!("--cache-wait {} is not from 0 to 3600", self.cache_wait)));
        }
        if config.hashing.is_some() {
            return Err(Error::request("stores hash pages by SHA-256, and --kv-events by another recipe"));
        }
        if config.pool.swap_pages == 0 {
            return Err(Error::request("stores of K and V need --swap-space"));
        }
        if args.sparse.is_some() {
            return Err(Error::request("stores of K and V are not for --sparse"));
        }
        if self.is_remote() && self.cache_secret_file.is_none() && !self.cache_trust {
            return Err(Error::request("remote stores need --cache-secret-file, or --cache-trust"));
        }
        config.hashing = Some(HASHING);
        let [least, most] = STAGE_PAGES;
        config.pool.stage_pages = (config.pool.swap_pages / 16).clamp(least, most);
        Ok(())
    }

    /// Opens the stores, if the command line names some, and lets the server use them.
    ///
    /// # Errors
    /// A store, the secret or the model's files cannot be opened.
    pub fn attach<R>(&self, args: &Args, server: Server<R>) -> Result<Server<R>>
    where
        R: Runner<Backend: RankMemory<Error: 'static> + 'static>,
    {
        if !self.is_given() {
            return Ok(server);
        }
        let secret = self.cache_secret_file.as_deref().map(Secret::from_file).transpose();
        let secret = secret.map_err(|error| Error::request(format!("--cache-secret-file: {error}")))?;
        let stores = self.open(secret.is_some() || self.cache_trust)?;
        let scales = setup::scales(args)?;
        let shape = server.engine().shape();
        let (layers, heads) = (shape.layout.layers(), shape.layout.most_kv_heads());
        let ranks = server.engine().backend().ranks() as u32;
        let identity = Identity {
            weights: self.weights(args)?,
            hashing: HASHING,
            layout: &shape.layout,
            scales: scales.as_ref(),
            labels: None,
            rope: "", // The digest of the weights covers the model's config.
            layers: 0..layers,
            heads: 0..heads,
            heads_of_model: ranks * heads,
            numerics: if args.backend == BackendName::Cuda { "cuda" } else { "cpu" },
        };
        let (sender, woken) = channel();
        let wake = Arc::new(move || sender.send(()).unwrap_or(()));
        let patience = Duration::from_secs_f64(self.cache_wait);
        let options = TierOptions { secret, patience, wake, ..TierOptions::new(identity.of_ranks(ranks), stores) };
        let tier = Tier::new(options, server.engine()).map_err(|error| Error::run(error.to_string()))?;
        let server = server.with_stores(Box::new(TierStores::new(tier, woken)));
        Ok(if self.role == Role::Prefill { server.hand_over() } else { server })
    }

    fn open(&self, is_trusted: bool) -> Result<Vec<StoreOptions>> {
        let mut stores = Vec::new();
        let of = |name: &str, store: Arc<dyn Store>| {
            let (threads, writes) = (self.cache_threads.into(), self.cache_write == Switch::On);
            let options = StoreOptions::new(name, store);
            // The rate limits what puts take from decode steps. A prefill server has none.
            let write_rate = options.write_rate.filter(|_| self.role == Role::Both);
            StoreOptions { threads, writes, write_rate, ..options }
        };
        if let Some(path) = &self.cache_dir {
            let limit = (self.cache_limit * (1_u64 << 30) as f64) as u64;
            let options = DiskOptions { is_shared: is_trusted, ..DiskOptions::new(path, limit) };
            let disk =
                Disk::open(options).map_err(|e| Error::request(format!("--cache-dir {}: {e}", path.display())))?;
            let is_in_memory = disk.is_in_memory();
            let disk = of("disk", Arc::new(disk));
            let write_rate = disk.write_rate.filter(|_| !is_in_memory);
            stores.push(StoreOptions { removes_damage: true, write_rate, ..disk });
        }
        if let Some(url) = &self.cache_url {
            let invalid = |error| Error::request(format!("--cache-url: {error}"));
            if url.starts_with("redis") || url.starts_with("unix:") {
                let redis = Redis::new(url, self.cache_ttl.map(Duration::from_secs)).map_err(invalid)?;
                if let Ok(Some(warning)) = redis.policy_warning() {
                    eprintln!("kvarena-server: {warning}");
                }
                stores.push(of("redis", Arc::new(redis)));
            } else {
                stores.push(of("objects", Arc::new(Objects::new(url, std::env::vars()).map_err(invalid)?)));
            }
        }
        if let Some(command) = &self.cache_exec {
            let command: Vec<_> = command.split_whitespace().map(str::to_owned).collect();
            let child = Child::new(&command, CHILD_RECORD);
            stores.push(of("child", Arc::new(child.map_err(|e| Error::request(format!("--cache-exec: {e}")))?)));
        }
        Ok(stores)
    }

    /// Returns the digest of the model's files. The built-in and the random models have none.
    fn weights(&self, args: &Args) -> Result<[u8; 32]> {
        let Some(model) = &args.model else {
            let name = args.random_model.map_or_else(|| "built in".to_owned(), |shape| shape.name());
            let mut digest = [0; 32];
            let text = format!("{name} {}", args.seed);
            digest.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
            return Ok(digest);
        };
        let known = self.cache_dir.as_ref().map(|folder| folder.join("digests"));
        let digest = weights::digest(model, EXTENSIONS, known.as_deref());
        digest.map_err(|error| Error::model(format!("{}: {error}", model.display())))
    }

    /// Writes K and V to the stores at the end, and reports what they did.
    ///
    /// # Errors
    /// The backend failed.
    pub fn finish<R: Runner>(&self, args: &Args, server: &mut Server<R>) -> Result<()> {
        let is_flushed = server.flush_stores(Duration::from_secs(self.flush_seconds))?;
        if !is_flushed && self.cache_write == Switch::On {
            eprintln!("kvarena-server: the stores do not have all K and V");
        }
        if let Some(stores) = server.stores().filter(|_| !args.quiet) {
            eprint!("{}", stores.counters().report());
        }
        Ok(())
    }
}
