//! Lists, checks and removes the records of a cache folder, and removes a namespace from a remote store.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use kvarena::hash::NamespaceNames;
use kvarena_tiers::check::Secret;
use kvarena_tiers::disk::Cache;
use kvarena_tiers::name::{Fingerprint, Space, read_hex};
use kvarena_tiers::store::Store;

const USAGE: &str = "\
usage: kvarena-cache ls DIR                            models and namespaces: files, bytes, ages
       kvarena-cache check DIR [SECRET_FILE]           reads all records; status 1 if some are damaged
       kvarena-cache gc DIR BYTES                      removes the oldest records beyond BYTES
       kvarena-cache forget DIR FINGERPRINT [SPACE]    removes the records of a model, or of a namespace
       kvarena-cache forget URL FINGERPRINT SPACE      the same in Redis, Valkey or an object store
       kvarena-cache space SALT [SECRET_FILE]          the namespace of a salt";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(Some(0)) => ExitCode::SUCCESS,
        Ok(Some(damaged)) => {
            eprintln!("{damaged} damaged records");
            ExitCode::from(1)
        }
        Ok(None) => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("kvarena-cache: {error}");
            ExitCode::from(2)
        }
    }
}

/// Returns the number of damaged records. `None` for wrong arguments.
fn run(arguments: &[&str]) -> Result<Option<u64>, Box<dyn Error>> {
    let open = |path: &str| Cache::open(Path::new(path)).map_err(|error| format!("{path}: {error}"));
    match arguments {
        ["ls", path] => list(&open(path)?)?,
        ["check", path] => return check(&open(path)?, None).map(Some),
        ["check", path, file] => return check(&open(path)?, Some(&Secret::from_file(Path::new(file))?)).map(Some),
        ["gc", path, bytes] => {
            let Some(done) = open(path)?.collect(bytes.parse()?)? else {
                return Err("another process collects".into());
            };
            println!(
                "removed {} of {} files, {} of {} bytes",
                done.removed_files, done.files, done.removed_bytes, done.bytes
            );
        }
        ["forget", url, fingerprint, space] if url.contains("://") => {
            let (mut model, mut own) = (Fingerprint([0; 32]), Space([0; 16]));
            // Names contain these bytes alone.
            model.0[..8].copy_from_slice(&read_hex::<8>(fingerprint)?);
            own.0[..8].copy_from_slice(&read_hex::<8>(space)?);
            remote(url)?.remove_space(&model, own)?;
        }
        ["space", salt] => println!("{}", space_of(salt, None)),
        ["space", salt, file] => println!("{}", space_of(salt, Some(&Secret::from_file(Path::new(file))?))),
        ["forget", path, fingerprint] => open(path)?.forget(read_hex(fingerprint)?, None)?,
        ["forget", path, fingerprint, space] => open(path)?.forget(read_hex(fingerprint)?, Some(read_hex(space)?))?,
        _ => return Ok(None),
    }
    Ok(Some(0))
}

fn space_of(salt: &str, secret: Option<&Secret>) -> Space {
    Space::of(&NamespaceNames { salt: Some(salt.to_owned()), ..NamespaceNames::default() }, secret)
}

/// Opens a remote store.
fn remote(url: &str) -> Result<Box<dyn Store>, Box<dyn Error>> {
    #[cfg(feature = "redis")]
    if url.starts_with("redis") {
        return Ok(Box::new(kvarena_tiers::redis::Redis::new(url, None)?));
    }
    #[cfg(feature = "object-store")]
    if !url.starts_with("redis") {
        return Ok(Box::new(kvarena_tiers::objects::Objects::new(url, std::env::vars())?));
    }
    Err(format!("{url}: this program was built without the store's feature").into())
}

fn list(cache: &Cache) -> Result<(), Box<dyn Error>> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() as i64;
    let mut all = BTreeMap::new();
    cache.list(|file| {
        let (files, bytes, oldest, newest) =
            all.entry((file.name.fingerprint, file.name.space)).or_insert((0_u64, 0_u64, file.used, file.used));
        (*files, *bytes) = (*files + 1, *bytes + file.bytes);
        (*oldest, *newest) = (file.used.min(*oldest), file.used.max(*newest));
    })?;
    println!("model            space            files        bytes            age s");
    for ((fingerprint, space), (files, bytes, oldest, newest)) in all {
        let [fingerprint, space] = [fingerprint, space].map(u64::from_be_bytes);
        let [oldest, newest] = [oldest, newest].map(|used| now - used);
        println!("{fingerprint:016x} {space:016x} {files:<12} {bytes:<16} {newest} to {oldest}");
    }
    Ok(())
}

fn check(cache: &Cache, secret: Option<&Secret>) -> Result<u64, Box<dyn Error>> {
    let (mut names, mut damaged) = (Vec::new(), 0);
    cache.list(|file| names.push(file.name))?;
    for name in &names {
        if let Err(miss) = cache.check(name, secret)? {
            println!("{name}: {miss}");
            damaged += u64::from(miss.is_damage());
        }
    }
    println!("{} records", names.len());
    Ok(damaged)
}
