//! Marks: comments in the PTX that become instructions on newer devices.
//!
//! Most PTX is for compute capability 8.0 and later. Instructions of 9.0, for programmatic dependent launch
//! (`driver/launch.rs`) and fp8, are comments in it (`pdl.cuh` and `e4m3.cuh` of `ptx/src/common`). This module
//! replaces them if the device has the instructions. Texts for 9.0 alone need no marks.

use std::borrow::Cow;

/// Comments in the PTX, and the instructions that replace them.
const MARKS: [(&str, &str); 2] =
    [("// pdl: wait", "griddepcontrol.wait;"), ("// pdl: launch dependents", "griddepcontrol.launch_dependents;")];

/// Start of a comment that contains a line for newer devices. A line that ends with [`OLDER`] is only for older devices
/// (`e4m3.cuh`).
const NEWER: &str = "// sm_90: ";
const OLDER: &str = "// sm_80";

/// Returns the PTX for a device, with its instructions in place of marks.
pub(super) fn with_marks(ptx: &str, capability: u32) -> Cow<'_, str> {
    if capability < 90 || !(ptx.contains(MARKS[0].0) || ptx.contains(NEWER)) {
        return Cow::Borrowed(ptx);
    }
    let ptx = ptx.replace(".target sm_80", ".target sm_90");
    let lines: Vec<&str> = ptx.split('\n').filter(|line| !line.ends_with(OLDER)).collect();
    let ptx = lines.join("\n").replace(NEWER, "");
    Cow::Owned(MARKS.iter().fold(ptx, |ptx, (mark, instruction)| ptx.replace(mark, instruction)))
}

#[cfg(test)]
mod tests {
    use super::super::archive::find;
    use super::super::kernel::{Kernel, Step};
    use super::super::table::{HEAD_DIMS, KERNELS};
    use super::{MARKS, NEWER, OLDER, with_marks};
    use crate::backend::cuda::kernels::params::PAGE_TOKENS_MAX;

    /// Returns the texts of all kernels; each archive is decompressed once.
    fn texts() -> Vec<(&'static Kernel, String)> {
        let mut archives: Vec<(&str, String)> = Vec::new();
        let kernels = KERNELS.iter().map(|kernel| {
            let archive = kernel.archive();
            let known = archives.iter().position(|(name, _)| *name == archive.name());
            let index = known.unwrap_or_else(|| {
                let texts = archive.decompress().expect("an intact archive");
                archives.push((archive.name(), texts));
                archives.len() - 1
            });
            let text = find(&archives[index].1, kernel.text()).expect("the kernel's text");
            let (_, entry) = text.split_once(&format!(".entry {}(", kernel.name())).expect("the entry is in its text");
            let marked = text.contains(MARKS[0].0) && text.contains(".target sm_80");
            assert!(marked || !text.contains(MARKS[0].0), "{}", kernel.name());
            (kernel, entry.split(".entry").next().unwrap_or_default().to_owned())
        });
        kernels.collect()
    }

    #[test]
    fn kernels_with_pdl_wait_before_they_read() {
        for (kernel, entry) in texts() {
            let name = kernel.name();
            let marks = entry.contains(MARKS[0].0) || entry.contains(MARKS[0].1);
            assert_eq!(marks, kernel.waits(90), "{name}");
            if !marks {
                continue;
            }
            let wait = if entry.contains(MARKS[0].0) { MARKS[0].0 } else { MARKS[0].1 };
            // The check covers the text before the last wait, because CTAs without work may wait earlier in the text.
            // If warps or CTAs have different roles, each role waits, and the text of one role precedes the wait of
            // another. Then the check covers only the text before the first wait.
            let roles = entry.contains("setmaxnreg") || name.starts_with("attend_shared_");
            let split = if roles { entry.split_once(wait) } else { entry.rsplit_once(wait) };
            let (before, _) = split.expect("a kernel of PDL waits");
            // Only the plan and the tables may be read before the wait. A prefetch reads nothing.
            for line in before.lines().filter(|line| line.contains(".global")) {
                let known = ["ld.global.nc.", "cp.async.ca.shared.global", "prefetch.global."];
                assert!(known.iter().any(|start| line.contains(start)), "{name}: {line}");
            }
        }
    }

    #[test]
    fn decode_kernels_keep_the_slot_of_the_largest_page() {
        let decode = |kernel: &Kernel| {
            let serves = kernel.supported();
            serves.is_some_and(|serves| serves.step == Step::Decode) && !kernel.is_sm90a()
        };
        let texts = texts();
        let decodes = texts.iter().filter(|(kernel, _)| decode(kernel));
        for (kernel, ptx) in decodes.clone() {
            let masks = |mask: u32| {
                let end = format!(", {mask};");
                ptx.lines().any(|line| line.contains("and.b32") && line.ends_with(&end))
            };
            assert!(masks(PAGE_TOKENS_MAX - 1) && masks(PAGE_TOKENS_MAX), "{}", kernel.name());
        }
        // Two numbers of query rows, two types of rows, and pools of this type or of fp8.
        assert_eq!(decodes.count(), 8 * HEAD_DIMS.len());
    }

    #[test]
    fn the_script_has_the_same_marks() {
        let script = include_str!("../../../../ptx/pdl.py");
        for (mark, instruction) in MARKS {
            assert!(script.contains(&format!("\"{mark}\": \"{instruction}\"")), "{mark}");
        }
        assert!(script.contains(&format!("\"{NEWER}\", \"{OLDER}\"")));
    }

    #[test]
    fn newer_devices_get_newer_lines() {
        let ptx = ".target sm_80\n\ta; // sm_80\n// sm_90: b;\n\tc;";
        assert_eq!(with_marks(ptx, 89), ptx);
        assert_eq!(with_marks(ptx, 90), ".target sm_90\nb;\n\tc;");
    }
}
