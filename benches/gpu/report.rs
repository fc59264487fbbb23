//! The table and the JSON rows.

use std::fmt::Write;

use crate::Outcome;

/// What a row counts per second.
#[derive(Clone, Copy, Debug)]
pub enum Rate {
    /// Bytes, given those of one call.
    Bytes(f64),
    /// Floating point operations, given those of one call.
    Flop(f64),
    /// Nothing.
    None,
}

/// Rows so far.
#[derive(Debug, Default)]
pub struct Report {
    rows: Vec<String>,
    /// Sections and cases of rows whose numbers are wrong.
    wrong: Vec<String>,
}

impl Report {
    /// Prints and keeps a row: microseconds of one call.
    pub fn row(&mut self, section: &str, case: &str, kind: &str, us: f64, rate: Rate, ok: bool) {
        let (shown, json) = match rate {
            Rate::Bytes(bytes) => {
                let gbs = bytes / us / 1e3;
                (format!("{gbs:9.1} GB/s"), format!(", \"gbs\": {gbs:.1}"))
            }
            Rate::Flop(flop) => {
                let tflops = flop / us / 1e6;
                (format!("{tflops:9.1} TFLOP/s"), format!(", \"tflops\": {tflops:.1}"))
            }
            Rate::None => (String::new(), String::new()),
        };
        if !ok {
            self.wrong.push(format!("{section} {case} {kind}"));
        }
        let wrong = if ok { "" } else { "  NOT OK" };
        println!("{section:7}{case:40} {kind:22} {us:11.2} us {shown}{wrong}");
        let mut row = String::new();
        let _ = write!(
            row,
            "{{\"section\": \"{section}\", \"case\": \"{case}\", \"impl\": \"{kind}\", "
        );
        let _ = write!(row, "\"us\": {us:.3}{json}, \"ok\": {ok}}}");
        self.rows.push(row);
    }

    /// Writes the JSON file.
    ///
    /// # Errors
    /// The file's, or the rows that are not right.
    pub fn write(&self) -> Outcome<()> {
        let folder = std::env::var("OUT").unwrap_or_else(|_| ".".into());
        let text = format!("{{\"schema\": 1, \"rows\": [\n{}\n]}}\n", self.rows.join(",\n"));
        std::fs::write(format!("{folder}/kvarena.json"), text)?;
        match self.wrong.len() {
            0 => Ok(()),
            count => Err(format!("{count} rows are not ok: {}", self.wrong.join(", ")).into()),
        }
    }
}
