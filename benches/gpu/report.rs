//! The table and the JSON rows.

use std::fmt::Write;

use half::bf16;

use crate::Outcome;

/// Unit of a row's rate.
#[derive(Clone, Copy, Debug)]
pub enum Rate {
    /// Bytes of one call.
    Bytes(f64),
    /// Floating-point operations of one call.
    Flop(f64),
    /// No rate.
    None,
}

impl Rate {
    /// Returns the operations of attention of 32 heads of 128: rows of `new` tokens each, after `cached` tokens.
    pub fn extend(rows: u32, new: u32, cached: u32) -> Self {
        let (new, cached) = (f64::from(new), f64::from(cached));
        let pairs = new * cached + new * (new + 1.0) / 2.0;
        Self::Flop(f64::from(rows) * 4.0 * 128.0 * 32.0 * pairs)
    }
}

/// Distance of rows from exact rows: the norm of the difference divided by the norm of the exact rows.
#[derive(Debug, Default)]
pub struct Distance {
    wrong: f64,
    norm: f64,
}

impl Distance {
    /// Adds a row.
    pub fn add(&mut self, row: &[bf16], exact: &[f64]) {
        for (x, y) in row.iter().zip(exact) {
            self.wrong += (x.to_f64() - y).powi(2);
            self.norm += y * y;
        }
    }

    /// Returns whether rounding to bf16 explains the distance.
    pub fn is_small(&self) -> bool {
        (self.wrong / self.norm).sqrt() < 1e-2
    }
}

/// The rows printed so far.
#[derive(Debug, Default)]
pub struct Report {
    rows: Vec<String>,
    /// Sections and cases of rows with wrong numbers.
    wrong: Vec<String>,
}

impl Report {
    /// Prints and stores a row: microseconds of one call.
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
        let _ = write!(row, "{{\"section\": \"{section}\", \"case\": \"{case}\", \"impl\": \"{kind}\", ");
        let _ = write!(row, "\"us\": {us:.3}{json}, \"ok\": {ok}}}");
        self.rows.push(row);
    }

    /// Writes the JSON file.
    ///
    /// # Errors
    /// The file cannot be written, or a row has wrong numbers.
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
