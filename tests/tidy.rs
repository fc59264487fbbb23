//! The repository's rules that no compiler checks: imports, places of `unsafe` and `cust`, sizes of files, words that
//! were retired, and tables that must equal the code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Modules and their ranks. A module uses only modules of lower rank; those of rank 0 may use one another.
const RANKS: [(&str, u32); 26] = [
    ("id", 0),
    ("error", 0),
    ("hash", 0),
    ("layout", 0), // These four form one vocabulary: errors name ids, sizes are checked.
    ("memory", 0), // It depends on no module.
    ("bitmap", 1),
    ("config", 1),
    ("event", 1),
    ("fence", 1),
    ("plan", 1),
    ("moves", 1),
    ("stats", 1),
    ("page", 2),
    ("swap", 2),
    ("prefix", 3),
    ("sequence", 2),
    ("step", 2),
    ("backend", 2),
    ("world", 4),
    ("system", 5),
    ("tree", 5),
    ("engine", 6),
    ("testkit", 7),
    ("guide", 8), // Documentation only.
    ("lib", 8),
    ("tests", 9),
];

/// Maximum lines of a source file's code.
const LINES_MAX: usize = 600;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn files(folder: &Path, extension: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap_or_else(|_| panic!("no folder {}", folder.display())) {
        let path = entry.expect("a folder can be listed").path();
        if path.ends_with("target") {
            continue; // Build output.
        }
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|e| e == extension) {
            let text = fs::read_to_string(&path).expect("sources are text");
            found.push((path, text));
        }
    }
    found
}

fn sources() -> Vec<(PathBuf, String)> {
    let sources = files(&root().join("src"), "rs");
    assert!(sources.len() > 30, "the sources are found");
    sources
}

/// Returns the top-level module of a file.
fn module(path: &Path) -> String {
    let path = path.strip_prefix(root().join("src")).expect("a source");
    let first = path.components().next().expect("a name").as_os_str();
    Path::new(first).file_stem().expect("a name").to_string_lossy().into_owned()
}

fn rank(module: &str) -> u32 {
    let found = RANKS.iter().find(|(name, _)| *name == module);
    found.unwrap_or_else(|| panic!("module {module} has no rank in tests/tidy.rs")).1
}

/// Returns a file's lines without lines of comments and without its inline tests, which are at its end.
fn code(text: &str) -> impl Iterator<Item = &str> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().expect("there is a first part");
    code.lines().filter(|line| !line.trim_start().starts_with("//"))
}

#[test]
fn imports_run_one_way() {
    for (path, text) in sources() {
        // Tests in a separate file may use the testkit.
        let own = if path.ends_with("tests.rs") { "tests".to_owned() } else { module(&path) };
        for line in code(&text) {
            for used in line.split("crate::").skip(1) {
                let name: String = used.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect();
                if own == "lib" || name.is_empty() || name == own || used.starts_with(['{', ')']) {
                    continue;
                }
                let (own_rank, rank) = (rank(&own), rank(&name));
                let vocabulary = own_rank == 0 && rank == 0;
                assert!(rank < own_rank || vocabulary, "{}: {own} may not use {name}: {line}", path.display());
            }
        }
    }
}

/// Returns the file of a module's child, if any.
fn child(folder: &Path, name: &str) -> Option<PathBuf> {
    let files = [folder.join(format!("{name}.rs")), folder.join(name).join("mod.rs")];
    files.into_iter().find(|file| file.exists())
}

/// Returns the names of paths that follow a prefix, as in `super::name`.
fn names_after<'a>(line: &'a str, prefix: &'a str) -> impl Iterator<Item = Vec<&'a str>> {
    line.split(prefix).skip(1).map(|rest| {
        let path = rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':');
        path.take(1).flat_map(|path| path.split("::")).collect()
    })
}

/// Returns the files that a file imports from, except its module's own file: a child may use its parent's items.
fn imports(path: &Path, text: &str) -> BTreeSet<PathBuf> {
    let src = root().join("src");
    let folder = path.parent().expect("a folder");
    let own = if path.ends_with("mod.rs") || folder == src { None } else { Some(folder) };
    let mut found = BTreeSet::new();
    for line in code(text) {
        for names in own.into_iter().flat_map(|folder| names_after(line, "super::").map(move |names| (folder, names))) {
            found.extend(names.1.first().and_then(|name| child(names.0, name)));
        }
        for names in names_after(line, "crate::") {
            let Some(first) = names.first().and_then(|name| child(&src, name)) else { continue };
            let inner = names.get(1).and_then(|name| child(&src.join(names[0]), name));
            found.insert(inner.unwrap_or(first));
        }
    }
    found.remove(path);
    found
}

#[test]
fn no_files_import_one_another_in_a_circle() {
    let files = sources();
    let mut rest: BTreeMap<_, _> = files.iter().map(|(path, text)| (path.clone(), imports(path, text))).collect();
    // Remove files whose imports are all removed; the rest is a cycle, or imports from a cycle.
    loop {
        let gone: Vec<_> = rest
            .iter()
            .filter(|(_, imports)| !imports.iter().any(|import| rest.contains_key(import)))
            .map(|(path, _)| path.clone())
            .collect();
        if gone.is_empty() {
            break;
        }
        gone.iter().for_each(|path| drop(rest.remove(path)));
    }
    // Files from which no remaining file imports are not part of the cycle.
    while let Some(path) = {
        let used: BTreeSet<_> = rest.values().flatten().cloned().collect();
        rest.keys().find(|path| !used.contains(*path)).cloned()
    } {
        rest.remove(&path);
    }
    let circle: Vec<_> = rest.keys().collect();
    assert!(circle.is_empty(), "these import from one another: {circle:#?}");
}

#[test]
fn unsafe_and_cust_stay_behind_the_seam() {
    for (path, text) in sources() {
        // memory.rs has two hints, for huge pages and for prefetches; their comments give the gain.
        let is_in = |part| path.starts_with(root().join("src/backend").join(part));
        let may_use_cust = is_in("cuda");
        let may_be_unsafe = may_use_cust || is_in("cpu/simd") || path.ends_with("src/memory.rs");
        for line in code(&text) {
            let words: Vec<&str> = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
            let allowed = may_be_unsafe || line.contains("unsafe_code");
            let is_kept = (allowed || !words.contains(&"unsafe")) && (may_use_cust || !words.contains(&"cust"));
            assert!(is_kept, "{}: {line}", path.display());
        }
    }
}

/// A program that reads a file at the place where it was built fails on any other machine. Only tests may do so.
#[test]
fn only_tests_read_the_source_tree() {
    let candle = ["crates/candle/src", "crates/candle/models/src", "crates/candle/models/examples"];
    let folders = ["src", "examples", "crates/events", "crates/host", "crates/server", "crates/tiers"];
    let folders = folders.into_iter().chain(candle).map(|folder| root().join(folder));
    for (path, text) in folders.collect::<Vec<_>>().iter().flat_map(|folder| files(folder, "rs")) {
        let is_test = |part: &std::ffi::OsStr| part == "tests" || part == "tests.rs";
        let is_test = path.iter().any(is_test) || path.ends_with("examples/replay/exact.rs");
        let found = code(&text).find(|line| line.contains("CARGO_MANIFEST_DIR"));
        assert!(is_test || found.is_none(), "{}: {found:?}", path.display());
    }
}

#[test]
fn the_cuda_feature_is_named_at_the_seam_only() {
    let mut named = 0;
    for (path, text) in sources() {
        let seam = path.ends_with("backend/mod.rs") || path.ends_with("lib.rs");
        for line in code(&text).filter(|line| line.contains("feature = \"cuda\"")) {
            assert!(seam, "{}: {line}", path.display());
            named += 1;
        }
    }
    assert!(named <= 3, "the feature is named {named} times");
}

#[test]
fn public_items_are_documented_ones() {
    for (path, text) in sources() {
        let may_hide = module(&path) == "testkit" || path.to_string_lossy().contains("backend/cuda");
        assert!(may_hide || !text.contains("doc(hidden)"), "{} hides a public item", path.display());
    }
}

#[test]
fn the_root_has_few_names() {
    let text = fs::read_to_string(root().join("src/lib.rs")).expect("it is there");
    let text: String = code(&text).collect();
    let names = text.split("pub use ").skip(1).map(|list| list.split(';').next().expect("a list").split(',').count());
    assert!((1..=30).contains(&names.sum::<usize>()), "a reader sees all names of the root on one page");
}

#[test]
fn only_the_tree_makes_locks() {
    for (path, text) in sources() {
        let tree = module(&path) == "prefix" || module(&path) == "id" || path.ends_with("tests.rs");
        for line in code(&text).filter(|line| line.contains("PrefixLock::new")) {
            assert!(tree, "{}: {line}", path.display());
        }
    }
}

#[test]
fn files_are_short_plain_and_say_what_they_are() {
    for (path, text) in sources() {
        let shown = path.display();
        assert!(text.is_ascii(), "{shown} is not ASCII");
        assert!(text.starts_with("//!"), "{shown} has no header");
        let lines = code(&text).count();
        assert!(lines <= LINES_MAX, "{shown} has {lines} lines of code");
        // Cells of a table cannot be wrapped.
        let is_row = |line: &str| line.starts_with("//! | ");
        for (i, line) in text.lines().enumerate().filter(|(_, line)| !is_row(line)) {
            assert!(line.len() <= 120, "{shown}:{} is {} columns wide", i + 1, line.len());
        }
    }
}

#[test]
fn lines_beside_the_sources_are_no_wider() {
    let folders = ["tests", "benches", "fuzz/fuzz_targets", "examples", "crates/events", "crates/tiers"];
    let files = folders.iter().flat_map(|folder| files(&root().join(folder), "rs"));
    for (path, text) in files {
        for (i, line) in text.lines().enumerate() {
            assert!(line.len() <= 120, "{}:{} is wide", path.display(), i + 1);
        }
    }
}

#[test]
fn lines_of_the_main_documents_are_no_wider() {
    for name in ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"] {
        let text = fs::read_to_string(root().join(name)).expect("it is there");
        // Cells of a table cannot be wrapped.
        for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with('|')) {
            assert!(line.len() <= 120, "{name}:{} is {} columns wide", i + 1, line.len());
        }
    }
}

#[test]
fn architecture_names_every_folder_and_system() {
    let architecture = architecture();
    assert!(architecture.lines().count() <= 300, "ARCHITECTURE.md fits 300 lines");
    for (path, _) in sources() {
        let module = module(&path);
        assert!(architecture.contains(&module), "ARCHITECTURE.md does not name {module}");
        if module == "system" && !path.ends_with("mod.rs") {
            let system = path.file_stem().expect("a name").to_string_lossy().into_owned();
            assert!(architecture.contains(&system), "ARCHITECTURE.md does not name {system}");
        }
    }
}

#[test]
fn architecture_lists_exactly_the_invariants_of_the_sources() {
    let architecture = architecture();
    let cells = architecture.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" |"));
    let listed: BTreeSet<&str> = cells.flat_map(|(cell, _)| cell.split(", ")).filter(|word| is_number(word)).collect();
    let mut named = BTreeSet::new();
    for (path, text) in sources() {
        for number in invariants(&text) {
            // Rules of the backend contract, which `Backend` lists.
            let is_rule = number.starts_with('B');
            assert!(is_rule || listed.contains(number), "{}: {number}", path.display());
            named.insert(number.to_owned());
        }
    }
    let unnamed: Vec<_> = listed.iter().filter(|&&number| !named.contains(number)).collect();
    assert!(unnamed.is_empty(), "no source states or checks {unnamed:?}");
}

fn architecture() -> String {
    fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md is there")
}

/// Returns the numbers of invariants that a file checks, as in `"T3: ..."`, or states, as in `//! * T3. ...`.
fn invariants(text: &str) -> BTreeSet<&str> {
    let checked = text.split('"').filter_map(|string| string.split_once(": "));
    let comments = text.lines().filter_map(|line| line.trim_start().strip_prefix("//"));
    let stated = comments.filter_map(|line| line.get(1..)?.strip_prefix(" * ")?.split_once(". "));
    let starts = checked.chain(stated).flat_map(|(start, _)| start.split(", "));
    starts.filter(|start| is_number(start)).collect()
}

/// Returns whether a word is an invariant's number: an upper-case letter and decimal digits.
fn is_number(word: &str) -> bool {
    let mut chars = word.chars();
    let letter = chars.next().is_some_and(|c| c.is_ascii_uppercase());
    letter && word.len() > 1 && chars.all(|c| c.is_ascii_digit())
}

#[test]
fn numbers_of_invariants_are_found() {
    let text = "//! * M2, M3. Stated.\n    /// * T11. Stated.\nlet x = (\"G4: checked\", \"F32\", \"GB: no\");";
    assert_eq!(invariants(text), ["G4", "M2", "M3", "T11"].into());
}

/// Columns of the access table in `src/system/mod.rs`: each table's name and type.
const TABLES: [(&str, &str); 5] = [
    ("pages", "PagePool"),
    ("prefixes", "PrefixTree"),
    ("sequences", "SequenceTable"),
    ("steps", "StepLog"),
    ("fence", "Fence"),
];

/// Returns how a file borrows a table of this type: `writes`, `reads` or nothing.
fn borrows(text: &str, table: &str) -> &'static str {
    let mut found = "";
    for line in code(text) {
        for (at, _) in line.match_indices(table) {
            // The text between `&` and the type: a lifetime, `mut`, both or neither.
            let between = line[..at].rsplit_once('&').map_or(",", |(_, between)| between);
            let whole = !line[at + table.len()..].starts_with(|c: char| c.is_alphanumeric());
            if whole && between.ends_with("mut ") {
                return "writes";
            }
            if whole && (between.is_empty() || between.starts_with('\'')) {
                found = "reads";
            }
        }
    }
    found
}

#[test]
fn the_access_table_equals_the_systems_declarations() {
    let folder = root().join("src/system");
    let table = fs::read_to_string(folder.join("mod.rs")).expect("it is there");
    let mut lines = table.lines().filter_map(|line| line.strip_prefix("//! | "));
    let header = lines.next().expect("the table has a header");
    assert_eq!(header, format!("system | {} |", TABLES.map(|(name, _)| name).join(" | ")));
    let mut rows = BTreeMap::new();
    for line in lines {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        for link in cells[0].split("[`").skip(1) {
            let system = link.split('`').next().expect("a name").to_owned();
            rows.insert(system, cells[1..=TABLES.len()].to_vec());
        }
    }
    for (path, text) in files(&folder, "rs") {
        assert!(!text.contains("too_many_arguments"), "{}", path.display());
        let place = path.strip_prefix(&folder).expect("a file of the folder");
        let first = place.components().next().expect("a name").as_os_str();
        let system = Path::new(first).file_stem().expect("a name").to_string_lossy().into_owned();
        // The first file of a system declares its access, also for the system's other files.
        let is_part = place.components().count() > 1 && !path.ends_with("mod.rs");
        if is_part || ["mod", "access"].contains(&&*system) {
            continue;
        }
        let row = rows.remove(&system).unwrap_or_else(|| panic!("{system} is in no row"));
        assert_eq!(row, TABLES.map(|(_, table)| borrows(&text, table)), "{system}");
    }
    assert!(rows.is_empty(), "these are no systems: {rows:?}");
}

/// Words that would give a present word a second name, each with the present word. They are compared as whole words.
const RETIRED: [(&str, &str); 28] = [
    ("Beside", "ExtraParams"),
    ("Board", "Metrics"),
    ("ChunkTokens", "ChunkPages"),
    ("Desk", "EngineLoop"),
    ("Entered", "AdmissionKind"),
    ("Fronts", "InflightIndex"),
    ("HostCounts", "SwapCounts"),
    ("HostMemory", "SwapMemory"),
    ("HostMoves", "SwapMoves"),
    ("HostOnly", "SwapOnly"),
    ("HostPageId", "SwapPageId"),
    ("HostPool", "SwapPool"),
    ("Hosts", "Swap"),
    ("Meeting", "SharedPrefixFinder"),
    ("NO_HOST_PAGE", "NO_SWAP_PAGE"),
    ("Room", "PageBudget"),
    ("TAIL_ROWS", "SUFFIX_ROWS"),
    ("Talk", "Connection"),
    ("chunk_pages", "leaf_pages"),
    ("chunks_per_row", "leaves_per_row"),
    ("evict_to_host", "evict_to_swap"),
    ("has_hosts", "has_swap"),
    ("host_page", "swap_page"),
    ("incarnation", "preemption_epoch"),
    ("keep_hosts", "keep_swap"),
    ("knows_its_end", "last_entry_is_consistent"),
    ("not_a_branch", "first_invalid"),
    ("tell_given", "emit_removed"),
];

#[test]
fn a_meaning_has_one_word() {
    let folders = ["src", "tests", "benches", "fuzz", "examples", "crates"];
    let files = folders.iter().flat_map(|folder| files(&root().join(folder), "rs"));
    let mut unused: BTreeSet<&str> = RETIRED.iter().map(|(_, present)| *present).collect();
    for (path, text) in files.filter(|(path, _)| !path.ends_with("tests/tidy.rs")) {
        for line in code(&text) {
            // Comments may use the words.
            let line = line.split("//").next().expect("there is a first part");
            for word in line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
                let retired = RETIRED.iter().find(|(retired, _)| *retired == word);
                assert_eq!(retired, None, "{}: {line}", path.display());
                unused.remove(word);
            }
        }
    }
    assert!(unused.is_empty(), "these words name nothing, so the list need not protect them: {unused:?}");
}
