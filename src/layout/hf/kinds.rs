//! The kind of each layer of a model: what it keeps. Fields of several forms say it.

use serde_json::Value;

use super::{Fields, HfError, is_set};
use crate::layout::groups::{GROUPED_LAYERS_MAX, Groups, Reach};

/// What a layer of a model keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// K and V of all tokens.
    All,
    /// K and V of a window.
    Window,
    /// K and V of a chunk.
    Chunk,
    /// A state.
    State,
    /// K and V of all tokens, and a state.
    Both,
    /// Nothing: it has only a feed-forward network.
    Nothing,
}
use Kind::*;

/// The kinds' names in `layer_types` and `layers_block_type`.
const NAMES: [(&str, Kind); 10] = [
    ("full_attention", All),
    ("attention", All),
    ("sliding_attention", Window),
    ("chunked_attention", Chunk),
    ("linear_attention", State),
    ("mamba", State),
    ("conv", State),
    ("hybrid", Both),
    ("mlp", Nothing),
    ("moe", Nothing),
];

/// The kinds' letters in `hybrid_override_pattern`.
const LETTERS: [(&str, Kind); 4] = [("*", All), ("M", State), ("-", Nothing), ("E", Nothing)];

/// Fields with the places of the layers that compute attention, from 0. The other layers keep a state.
const PLACES: [&str; 2] = ["full_attn_idxs", "attn_layer_indices"];

/// Default of `no_rope_layer_interval`: the interval of layers with full attention in a model with chunks.
const NO_ROPE_INTERVAL: u32 = 4;

/// The kinds of all layers.
pub(super) struct Kinds {
    /// The field that determines them.
    pub(super) field: &'static str,
    pub(super) of: Vec<Kind>,
}

impl Kinds {
    pub(super) fn contains(&self, kind: Kind) -> bool {
        self.of.contains(&kind)
    }

    pub(super) fn has_states(&self) -> bool {
        self.contains(State) || self.contains(Both)
    }
}

impl Fields<'_> {
    /// Returns the kinds of the layers; `None` if no field determines them.
    pub(super) fn kinds(&self) -> Result<Option<Kinds>, HfError> {
        for field in ["layer_types", "layers_block_type"] {
            if let Some(list) = self.list(field)?.filter(|list| !list.is_empty()) {
                let names = list.iter().map(|name| self.named(field, name, name.as_str(), &NAMES));
                return self.all(field, names.collect::<Result<_, _>>()?);
            }
        }
        let field = "hybrid_override_pattern";
        if let Some(value) = self.get(field) {
            let pattern = value.as_str().ok_or_else(|| self.unfit(field, value, "a text"))?;
            let letters = (0..pattern.len()).map(|at| self.named(field, value, pattern.get(at..at + 1), &LETTERS));
            return self.all(field, letters.collect::<Result<_, _>>()?);
        }
        match self.state_kinds()? {
            None => self.limited_kinds(),
            some => Ok(some),
        }
    }

    /// Returns the number of layers; without `num_hidden_layers`, that of a field with a kind for each.
    fn layers(&self) -> Result<u32, HfError> {
        let field = "num_hidden_layers";
        let listed = self.get("layers_block_type").and_then(Value::as_array).map(Vec::len);
        let lettered = self.get("hybrid_override_pattern").and_then(Value::as_str).map(str::len);
        match listed.or(lettered).filter(|&len| len > 0 && self.get(field).is_none()) {
            Some(len) => Ok(len as u32),
            None => self.size(field),
        }
    }

    /// Returns the kind with a name. `value` is what an error shows.
    fn named(&self, field: &str, value: &Value, name: Option<&str>, names: &[(&str, Kind)]) -> Result<Kind, HfError> {
        let kind = names.iter().find(|(known, _)| Some(*known) == name);
        kind.map(|(_, kind)| *kind).ok_or_else(|| self.unsupported(field, value))
    }

    /// Returns kinds that a field lists, if it has one for each layer.
    fn all(&self, field: &'static str, of: Vec<Kind>) -> Result<Option<Kinds>, HfError> {
        if of.len() == self.layers()? as usize {
            return Ok(Some(Kinds { field, of }));
        }
        Err(self.unfit(field, &self.map[field], "one for each of num_hidden_layers"))
    }

    /// Returns the kind of each layer from a function of its place from 0.
    fn each(&self, field: &'static str, kind: impl Fn(u32) -> Kind) -> Result<Option<Kinds>, HfError> {
        let layers = self.layers()?;
        self.check_grouped(layers as usize)?;
        Ok(Some(Kinds { field, of: (0..layers).map(kind).collect() }))
    }

    /// Returns the kinds of models whose layers all compute attention or keep a state.
    fn state_kinds(&self) -> Result<Option<Kinds>, HfError> {
        let either = |attends: bool| if attends { All } else { State };
        let field = "attn_type_list"; // MiniMax
        if let Some(list) = self.list(field)? {
            return self.all(field, list.iter().map(|value| either(is_set(value))).collect());
        }
        let field = "linear_attn_config"; // Kimi
        if let Some(part) = self.linear_attention()? {
            let full = part.places("full_attn_layers")?.unwrap_or_default();
            return self.each(field, |layer| either(full.contains(&(u64::from(layer) + 1))));
        }
        for field in PLACES {
            if let Some(full) = self.places(field)? {
                return self.each(field, |layer| either(full.contains(&layer.into())));
            }
        }
        let field = "full_attention_interval"; // Qwen3-Next
        if self.is_set(field) {
            let interval = self.size(field)?;
            return self.each(field, |layer| either((layer + 1).is_multiple_of(interval)));
        }
        let field = "attn_layer_period"; // Jamba
        if self.is_set(field) {
            let (period, offset) = (self.size(field)?, self.get("attn_layer_offset").and_then(Value::as_u64));
            let offset = offset.ok_or_else(|| self.missing("attn_layer_offset"))?;
            return self.each(field, |layer| either(u64::from(layer % period) == offset));
        }
        let field = "mamba_d_ssm"; // Falcon-H1
        if self.is_set(field) { self.each(field, |_| Both) } else { Ok(None) }
    }

    /// Returns the kinds of models without states, some of whose layers read a window or a chunk.
    fn limited_kinds(&self) -> Result<Option<Kinds>, HfError> {
        let every =
            |interval: u32, limited| move |layer: u32| if (layer + 1).is_multiple_of(interval) { All } else { limited };
        let field = "sliding_window_pattern";
        if self.is_set(field) && self.get("sliding_window").is_some() {
            return self.each(field, every(self.size(field)?, Window));
        }
        if self.get("attention_chunk_size").is_none() {
            return Ok(None);
        }
        let field = "no_rope_layers";
        if let Some(rope) = self.list(field)?.filter(|list| !list.is_empty()) {
            // Layers without rotary positions read all tokens.
            return self.all(field, rope.iter().map(|value| if is_set(value) { Chunk } else { All }).collect());
        }
        let field = "no_rope_layer_interval";
        let interval = if self.get(field).is_some() { self.size(field)? } else { NO_ROPE_INTERVAL };
        self.each("attention_chunk_size", every(interval, Chunk))
    }

    fn list(&self, field: &str) -> Result<Option<&[Value]>, HfError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let list = value.as_array().ok_or_else(|| self.unfit(field, value, "a list"))?;
        Ok(Some(list))
    }

    /// Returns a list of the places of layers.
    fn places(&self, field: &str) -> Result<Option<Vec<u64>>, HfError> {
        let Some(list) = self.list(field)? else { return Ok(None) };
        let place = |value: &Value| value.as_u64().ok_or_else(|| self.unfit(field, value, "the place of a layer"));
        list.iter().map(place).collect::<Result<_, _>>().map(Some)
    }

    /// Returns the number of layers that keep something, and their groups. The parts of states are not set.
    pub(super) fn groups(&self, kinds: Option<&Kinds>) -> Result<(u32, Groups), HfError> {
        let Some(kinds) = kinds else { return Ok((self.layers()?, Groups::ONE)) };
        let kept = |kind: &Kind| match kind {
            Both => [Some(All), Some(State)],
            Nothing => [None, None],
            &one => [Some(one), None],
        };
        let kept: Vec<Kind> = kinds.of.iter().flat_map(kept).flatten().collect();
        let unsupported = || self.refused(kinds.field);
        if !kept.contains(&All) {
            // Group 0 must read all tokens. Without states, one group keeps all tokens of all layers.
            let has_layers = !kept.is_empty() && !kinds.has_states();
            return if has_layers { Ok((kept.len() as u32, Groups::ONE)) } else { Err(unsupported()) };
        }
        let (mut reaches, mut groups) = (vec![Reach::All], vec![0; kept.len()]);
        for limited in [Window, Chunk, State].into_iter().filter(|kind| kept.contains(kind)) {
            let of_kind = groups.iter_mut().zip(&kept).filter(|(_, kind)| **kind == limited);
            of_kind.for_each(|(group, _)| *group = reaches.len() as u8);
            reaches.push(self.reach(limited)?);
        }
        self.check_grouped(kept.len())?;
        Ok((kept.len() as u32, Groups::new(&reaches, &groups).map_err(|_| unsupported())?))
    }

    fn reach(&self, limited: Kind) -> Result<Reach, HfError> {
        if limited == State {
            return Ok(Reach::State);
        }
        if limited == Window {
            return Ok(Reach::Window(self.size("sliding_window")?));
        }
        let field = "attention_chunk_size";
        let size = self.size(field)?;
        if size.is_power_of_two() {
            return Ok(Reach::Chunk(size));
        }
        Err(self.unfit(field, &self.map[field], "a power of two"))
    }

    /// Rejects more layers than groups can contain.
    fn check_grouped(&self, layers: usize) -> Result<(), HfError> {
        let name = "num_hidden_layers";
        if layers <= GROUPED_LAYERS_MAX {
            return Ok(());
        }
        let value = self.get(name).cloned().unwrap_or_else(|| layers.into());
        Err(self.unfit(name, &value, "256 layers of several kinds at most"))
    }
}
