#!/usr/bin/env bash
# Tests the published files as a user does. The packed crate and its unit tests compile. A crate that depends on it with
# feature `cuda` builds with the README's line on a machine without CUDA, starts without a driver, and finds an installed
# one. A shared library in the same program keeps its own driver.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD work=$PWD/target/package-test
# This script and the repository share the built dependencies.
export CARGO_TARGET_DIR=$root/target
unset CUDA_LIBRARY_PATH CUDA_PATH CUDA_ROOT CUDA_TOOLKIT_ROOT_DIR LD_LIBRARY_PATH
rm -rf "$work/crate" "$work/dependent"
mkdir -p "$work/crate" "$work/dependent/src"

# Cargo warns about each omitted bench, example and test.
warnings=$(cargo package --allow-dirty --no-verify 2>&1 | grep '^warning: ' | grep -v '^warning: ignoring \(benchmark\|example\|test\) ' || true)
if [ -n "$warnings" ]; then
    echo "cargo package warns: $warnings" >&2
    exit 1
fi
at_most() { # name, bytes, limit
    echo "$1: $2 bytes"
    [ "$2" -le "$3" ] || { echo "$1 is above $3 bytes" >&2; exit 1; }
}
at_most "the package" "$(stat -c %s "$CARGO_TARGET_DIR"/package/kvarena-*.crate)" 2700000
# -m sets new modification times. All packed files have one fixed time, with which cargo would reuse an earlier build.
tar -xzmf "$CARGO_TARGET_DIR"/package/kvarena-*.crate -C "$work/crate" --strip-components 1
if (cd "$work/crate" && find . -type f \( -path './.ci/*' ! -name docs-header.html -o -path './tests/*' \
    -o -path './benches/*' -o -path './fuzz/*' -o -name "*.safetensors" \)) | grep .; then
    echo "the package contains files that belong only to the repository" >&2
    exit 1
fi
# Each relative link of a packed document names a packed file.
(cd "$work/crate" && for document in *.md ptx/*.md; do
    for link in $(grep -oE '\]\([^)#]+' "$document" | cut -c3- | grep -v '://'); do
        [ -e "$(dirname "$document")/$link" ] || { echo "$document links $link, which is not packed" >&2; exit 1; }
    done
done)

# The crates in the order of publishing. Later ones find the earlier ones here instead of on crates.io.
cargo publish --dry-run --quiet --allow-dirty --no-verify 2>/dev/null
patches=(--config "patch.crates-io.kvarena.path='$root'")
for crate in events tiers host server candle; do
    folder=$root/crates; [ $crate != candle ] || folder+=/candle
    (cd "$folder" && cargo publish --dry-run --quiet --allow-dirty --no-verify -p kvarena-$crate "${patches[@]}" 2>/dev/null) ||
        { echo "kvarena-$crate cannot be published" >&2; exit 1; }
    patches+=(--config "patch.crates-io.kvarena-$crate.path='$root/crates/$crate'")
done

# Dependencies: few without the default features, and all under permissive licences.
small=$(cargo tree -e normal --prefix none --no-default-features | sed 's/ (.*//' | sort -u | wc -l)
echo "crates with --no-default-features: $small"
[ "$small" -le 21 ]
cargo metadata --format-version 1 --features cuda,serde,sha256,xxhash | python3 -c '
import json, re, sys
allowed = {"MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC",
           "MPL-2.0", "Unicode-3.0", "Unlicense", "Zlib", "0BSD"}
def permissive(licence):
    either = re.split(r" OR |/", licence.replace("(", "").replace(")", ""))
    return any(all(one in allowed for one in choice.split(" AND ")) for choice in either)
bad = [p["name"] for p in json.load(sys.stdin)["packages"] if not permissive(p.get("license") or "")]
sys.exit(f"not known as permissive: {bad}" if bad else 0)'

# The repository runs the same unit tests. Here they only have to compile, which shows that no file is missing.
(cd "$work/crate" && cargo check --quiet --all-targets)

# Program `symbols` takes the address of every function that cust_raw declares. It calls one with all argument
# registers in use.
raw=$(cargo metadata --format-version 1 --features cuda | grep -o '"manifest_path":"[^"]*/cust_raw-[^"]*/Cargo.toml"' | head -1 | cut -d'"' -f4)
names=$(sed -n 's/^    pub fn \(cu[A-Za-z0-9_]*\)(.*/\1/p' "$(dirname "$raw")/src/cuda.rs" | sort -u)
cd "$work/dependent"
cp "$root/Cargo.lock" .
cat >Cargo.toml <<'TOML'
[package]
name = "dependent"
edition = "2024"
[workspace]
[dependencies]
cust = { version = "0.3.2", optional = true }
kvarena = { path = "../crate" }
[features]
cuda = ["dep:cust", "kvarena/cuda"]
[profile.release]
strip = "symbols"
[[bin]]
name = "plain"
path = "src/plain.rs"
[[bin]]
name = "start"
path = "src/start.rs"
required-features = ["cuda"]
[[bin]]
name = "symbols"
path = "src/symbols.rs"
required-features = ["cuda"]
[[bin]]
name = "neighbour"
path = "src/neighbour.rs"
required-features = ["cuda"]
TOML
echo 'fn main() {}' >src/plain.rs
cat >src/start.rs <<'RUST'
fn main() {
    println!("{:?}", kvarena::backend::cuda::Gpu::new(0).map(|gpu| gpu.ordinal()));
}
RUST
{
    cat <<'RUST'
use cust::sys::*;
use kvarena as _;

type Long = unsafe extern "C" fn(i64, i64, i64, i64, i64, i64, i64, f64, f64, f64, f64, f64, f64, f64, f64, f64) -> u32;

fn main() {
    let all: &[*const ()] = std::hint::black_box(&[
RUST
    for name in $names; do echo "        $name as *const (),"; done
    cat <<'RUST'
    ]);
    let long: Long = unsafe { std::mem::transmute(cuArrayDestroy as *const ()) };
    let call = || unsafe { long(1, 2, 3, 4, 5, 6, 7, 8., 9., 10., 11., 12., 13., 14., 15., 16.) };
    println!("{} {} {}", all.len(), call(), call());
}
RUST
} >src/symbols.rs
cat >driver.c <<'C'
unsigned cuArrayDestroy(long a, long b, long c, long d, long e, long f, long g, double h, double i, double j, double k,
                        double l, double m, double n, double o, double p) {
  return a + 2*b + 3*c + 4*d + 5*e + 6*f + 7*g + 8*h + 9*i + 10*j + 11*k + 12*l + 13*m + 14*n + 15*o + 16*p;
}
C
# Program `neighbour` links a library that calls another driver (own.c).
cat >src/neighbour.rs <<'RUST'
#[link(name = "neighbour")]
unsafe extern "C" {
    fn neighbour_init() -> u32;
}

fn main() {
    let neighbour = unsafe { neighbour_init() };
    let cust = unsafe { cust::sys::cuInit(0) } as u32;
    println!("{neighbour} {cust} {:?}", kvarena::backend::cuda::Gpu::new(9).map(|gpu| gpu.ordinal()));
}
RUST
echo 'unsigned cuInit(unsigned flags) { return 7 + flags; }' >own.c
echo 'unsigned cuInit(unsigned); unsigned neighbour_init(void) { return cuInit(35); }' >neighbour.c
mkdir -p registers fake own
"${CC:-cc}" -O1 -fPIC -shared -Wl,-soname,libcuda-own.so.1 -o own/libcuda-own.so.1 own.c
"${CC:-cc}" -O1 -fPIC -shared -Wl,-rpath,'$ORIGIN' -o own/libneighbour.so neighbour.c own/libcuda-own.so.1
"${CC:-cc}" -O1 -fPIC -shared -o registers/libcuda.so.1 driver.c
"$root/tests/cuda/fake_driver/build.sh"
cp "$root/target/fake-driver/libcuda.so.1" fake

line=$(sed -n 's/^\(mkdir .*CUDA_LIBRARY_PATH=[^ ]*\).*/\1/p' "$root/README.md")
eval "$line"
cargo build --quiet --features cuda --bin start --bin symbols
cargo rustc --quiet --features cuda --bin neighbour -- -L own
run() { # expected output, program, folder of the driver
    local answer
    answer=$(LD_LIBRARY_PATH=${3:-} "$CARGO_TARGET_DIR/debug/$2")
    echo "$2${3:+ over $3}: $answer"
    [ "$answer" = "$1" ]
}
count=$(echo "$names" | wc -l)
run "Err(NoDriver)" start
run "Ok(0)" start fake
run "$count 34 34" symbols
run "$count 1496 1496" symbols registers
run "42 34 Err(NoDriver)" neighbour own
run "42 0 Err(NoDevice { ordinal: 9 })" neighbour own:fake
if nm -D --defined-only "$CARGO_TARGET_DIR/debug/neighbour" | grep ' cu[A-Z]'; then
    echo "the program exports symbols of the driver" >&2
    exit 1
fi

[ -n "${CI_FULL:-}" ] || exit 0
# Measures the bytes that the feature adds to a program without symbols.
size() { stat -c %s "$CARGO_TARGET_DIR/release/plain"; }
cat >src/plain.rs <<'RUST'
fn main() {
    println!("{:?}", kvarena::Engine::new(kvarena::PoolConfig::default(), kvarena::Null).is_ok());
    #[cfg(feature = "cuda")]
    {
        use kvarena::backend::cuda::{CudaOptions, Gpu};
        let open = |gpu| kvarena::Engine::new(kvarena::PoolConfig::default(), CudaOptions::new(&gpu)).map_err(|_| ());
        println!("{:?}", Gpu::new(0).map(|gpu| open(gpu).map(|mut engine| engine.backend_mut().prepare(&kvarena::backend::cuda::Prepare::new(&[kvarena::Attend::new(8, 64)])).is_ok())));
    }
}
RUST
cargo build --quiet --release --bin plain
without=$(size)
cargo build --quiet --release --features cuda --bin plain
at_most "the growth by feature cuda" $(($(size) - without)) 3000000
