//! The instructions that need compute capability 9.0: of programmatic dependent launch (PDL, `launch.rs`), of fp8. The
//! PTX is for 8.0 and newer, so they stand in it as comments (`ptx/pdl.cuh`, `ptx/e4m3.cuh`), which become instructions
//! here where the device has them.
//!
//! Not here: who launches what.

use std::borrow::Cow;

/// Comments in the PTX and the instructions they stand for.
const MARKS: [(&str, &str); 2] = [
    ("// pdl: wait", "griddepcontrol.wait;"),
    ("// pdl: launch dependents", "griddepcontrol.launch_dependents;"),
];

/// What begins a line that stands for itself where the device is newer, and what ends one that is then left out
/// (`ptx/e4m3.cuh`).
const NEWER: &str = "// sm_90: ";
const OLDER: &str = "// sm_80";

/// PTX for a device: with the instructions in place of the marks, where it has them.
pub(super) fn with_pdl(ptx: &str, capability: u32) -> Cow<'_, str> {
    if capability < 90 || !(ptx.contains(MARKS[0].0) || ptx.contains(NEWER)) {
        return Cow::Borrowed(ptx);
    }
    let ptx = ptx.replace(".target sm_80", ".target sm_90");
    let lines: Vec<&str> = ptx.split('\n').filter(|line| !line.ends_with(OLDER)).collect();
    let ptx = lines.join("\n").replace(NEWER, "");
    Cow::Owned(MARKS.iter().fold(ptx, |ptx, (mark, instruction)| ptx.replace(mark, instruction)))
}

/// Whether the kernels of a PTX file wait by themselves.
pub(super) fn uses_pdl(ptx: &str) -> bool {
    ptx.contains(MARKS[0].1)
}

#[cfg(test)]
mod tests {
    use super::{MARKS, NEWER, OLDER, uses_pdl, with_pdl};

    #[test]
    fn every_kernel_of_a_pdl_file_waits() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/ptx");
        let files = std::fs::read_dir(folder)
            .expect("the kernels")
            .map(|file| file.expect("a file").path());
        let mut pdl_files = 0;
        for file in files.filter(|file| file.extension().is_some_and(|end| end == "ptx")) {
            let ptx = std::fs::read_to_string(&file).expect("PTX is text");
            let count = |what: &str| ptx.matches(what).count();
            let (marks, waits) = (count(MARKS[0].0), count(MARKS[0].1));
            assert_eq!(uses_pdl(&ptx), waits > 0);
            assert!(
                marks == 0 || ptx.contains(".target sm_80"),
                "{file:?}: marks are for PTX of 8.0"
            );
            if marks + waits == 0 {
                continue;
            }
            pdl_files += 1;
            for kernel in ptx.split(".entry").skip(1) {
                let wait = if kernel.contains(MARKS[0].0) { MARKS[0].0 } else { MARKS[0].1 };
                // The last one: CTAs without work wait, too, and those waits may stand in front.
                // Where warps or CTAs have different roles each waits by itself: one's text is before another's wait.
                let name = kernel.trim_start();
                let roles = kernel.contains("setmaxnreg") || name.starts_with("attend_shared_");
                let split = if roles { kernel.split_once(wait) } else { kernel.rsplit_once(wait) };
                let (before, _) = split.expect("a kernel of PDL waits");
                // Plan and tables may be read before; a prefetch reads nothing.
                for line in before.lines().filter(|line| line.contains(".global")) {
                    let known = ["ld.global.nc.", "cp.async.ca.shared.global", "prefetch.global."];
                    assert!(known.iter().any(|start| line.contains(start)), "{file:?}: {line}");
                }
            }
        }
        assert!(pdl_files > 0);
    }

    #[test]
    fn the_scripts_know_the_same_marks() {
        let script = include_str!("../../../ptx/pdl.py");
        for (mark, instruction) in MARKS {
            assert!(script.contains(&format!("\"{mark}\": \"{instruction}\"")), "{mark}");
        }
        assert!(script.contains(&format!("\"{NEWER}\", \"{OLDER}\"")));
    }

    #[test]
    fn newer_devices_get_newer_lines() {
        let ptx = ".target sm_80\n\ta; // sm_80\n// sm_90: b;\n\tc;";
        assert_eq!(with_pdl(ptx, 89), ptx);
        assert_eq!(with_pdl(ptx, 90), ".target sm_90\nb;\n\tc;");
    }
}
