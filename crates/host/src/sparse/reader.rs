//! Attention of a step over the positions that labels find.

use kvarena::backend::{CpuError, Queries, Select, Selection, SparseBackend};
use kvarena::{Attend, BatchPlan, Cpu, LayerId};

use super::recall::Recall;

/// Selects positions and attends to them.
pub struct Reader {
    top: u32,
    /// `[rows, kv_heads, top]`
    positions: Vec<u32>,
    recall: Option<Recall>,
}

impl Reader {
    /// Returns a reader of `top` positions for each kv head. With `recall`, it also measures their share of attention's
    /// weight.
    pub fn new(top: u32, recall: Option<Recall>) -> Self {
        Self { top, positions: Vec::new(), recall }
    }

    /// Returns the measured recall, if requested.
    pub fn recall(&self) -> Option<&Recall> {
        self.recall.as_ref()
    }

    /// Computes a layer's attention. Rows with one new token read their selection; other rows read all visible tokens.
    ///
    /// # Errors
    /// The backend's error.
    pub fn attend(
        &mut self,
        backend: &mut Cpu,
        (plan, layer): (&BatchPlan<'_>, LayerId),
        attend: &Attend,
        (q, sinks): (&[f32], Option<&[f32]>),
        out: &mut [f32],
    ) -> Result<(), CpuError> {
        let (top, kv_heads) = (self.top, backend.layout().kv_heads());
        let select = Select { q_heads: attend.q_heads, top, window: attend.window };
        self.positions.resize(plan.rows.len() * kv_heads as usize * top as usize, 0);
        backend.select(plan, layer, &select, q.into(), &mut self.positions)?;
        if let Some(recall) = &mut self.recall {
            recall.measure(backend, (plan, layer), attend, q, (&self.positions, top))?;
        }
        let selection = Selection { positions: &self.positions[..], top };
        let queries = Queries { rows: q.into(), sinks };
        backend.attend_selected(plan, layer, attend, selection, queries, out.into(), None)
    }
}
