//! One step on the device: everything that is launched for it, in order.
//!
//! ```text
//! embed | for each layer: qkv, rotate and store, attend, out, gate and up, down | logits, sample
//! ```
//!
//! Not here: the operands of each product (`forward/operands.rs`) and its computation (`products.rs`), rotation and
//! store (`forward/store.rs`), the choice of tokens (`forward/sampling.rs`), the source of tokens (`image.rs`), and the
//! order of steps (`runner.rs`).

mod operands;
mod sampling;
mod store;

use std::rc::Rc;

use kvarena::backend::cuda::{Cuda, DeviceBuffer, DeviceRows, DeviceRowsMut, Prepare, StagedPlan};
use kvarena::{Attend, Backend, BatchPlan, LayerId};

use super::device::Device;
use super::error::GpuError;
use super::kernels::EmbedParams;
use super::products::{Choice, Op, Products, padded_rows};
use super::shape::check_shape;
use super::sparse::{Chosen, Gauge};
use super::sums::Link;
use super::weights::Weights;
use crate::config::ModelConfig;
use crate::sparse::channels::Measured;
use operands::qkv_width;
use store::Rotated;

/// A fault put in on purpose, to see that the check finds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fault {
    /// None.
    #[default]
    None,
    /// K and V go to another layer's pages.
    Page,
    /// Each token is rotated to where its neighbour stands.
    Position,
    /// Frequencies of neighbouring pairs are swapped.
    Rotary,
    /// Other channels are labels.
    Labels,
}

/// Which parts of a step are launched: all, but where their time is measured one by one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parts {
    /// Attention.
    pub attention: bool,
    /// Products, with what the way of each takes along.
    pub products: bool,
    /// Embedding, rotation and store, sampling.
    pub small: bool,
}

impl Parts {
    /// The whole step.
    pub const ALL: Self = Self { attention: true, products: true, small: true };
}

/// How large a step may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Most tokens of a step.
    pub tokens: usize,
    /// Most rows of logits made at a time.
    pub logits: usize,
    /// Most tokens chosen in a step.
    pub draws: usize,
}

/// A model's weights, products and activations on the device.
#[derive(Debug)]
pub struct Forward {
    /// Its shape.
    pub config: ModelConfig,
    weights: Rc<Weights>,
    /// To the other ranks, where there are any.
    link: Option<Link>,
    /// Up to so many rows ranks add their parts to x, which all have: the output's and the down product are such parts.
    /// With more rows, the first rank's products are added to its x, and the others' take its place, to be summed.
    part_rows: usize,
    /// Whether this rank chooses tokens: the first one does, since ranks may round differently.
    leads: bool,
    products: Products,
    limits: Limits,
    x: DeviceBuffer,
    normed: DeviceBuffer,
    qkv: DeviceBuffer,
    attended: DeviceBuffer,
    gate_up: DeviceBuffer,
    activated: DeviceBuffer,
    logits: DeviceBuffer,
    /// Tokens chosen, in the order of draws: the next step reads them.
    sampled: DeviceBuffer,
    best: DeviceBuffer,
    counters: DeviceBuffer,
    thresholds: DeviceBuffer,
    /// Frequencies with neighbours swapped, for [`Fault::Rotary`].
    swapped: DeviceBuffer,
    /// Where the backend stores, as into a quantised pool and into one with labels, or K is measured.
    rotated: Option<Rotated>,
    /// What rows of one new token read, where that is not all.
    chosen: Option<Chosen>,
    /// Who measures channels, where somebody does.
    gauge: Option<Gauge>,
    /// What is wrong on purpose.
    pub fault: Fault,
}

/// Where a step's tokens, draws and answers are on the device.
#[derive(Clone, Copy, Debug)]
pub struct StepAddresses {
    /// i32 tokens.
    pub tokens: u64,
    /// `DeviceDraw`s.
    pub draws: u64,
    /// The address of the answers' address.
    pub answers: u64,
    /// Draws, padding included.
    pub draw_count: usize,
    /// Whether some draw leaves tokens out.
    pub filtered: bool,
    /// Where some draw has a shape: the `DeviceShape`s and `Edit`s.
    pub shapes: Option<[u64; 2]>,
}

impl Forward {
    /// Memory for the activations of steps up to `limits`, of a whole model or of a rank's share.
    ///
    /// # Errors
    /// A shape that the kernels do not serve, or too little memory.
    pub fn new(
        device: &Device,
        config: ModelConfig,
        weights: Rc<Weights>,
        limits: Limits,
        choice: Choice,
        link: Option<Link>,
    ) -> Result<Self, GpuError> {
        check_shape(&config)?;
        let rows = padded_rows(limits.tokens);
        let limits = Limits { logits: padded_rows(limits.logits), ..limits };
        let ModelConfig { hidden, intermediate, vocab, .. } = config;
        let (q, qkv) = (config.q_heads * config.head_dim, qkv_width(&config));
        let widths = [2 * hidden, qkv, q, 3 * intermediate].iter().sum::<usize>();
        let wanted = 2 * (rows * widths + limits.logits * vocab) as u64;
        let free = device.gpu.free_memory()?;
        if wanted > free {
            return Err(GpuError::Memory { wanted, free });
        }
        let rows_of = |width: usize| device.zeros(2 * rows * width);
        let mut swapped = config.rope.frequencies.clone();
        swapped.chunks_exact_mut(2).for_each(|pair| pair.swap(0, 1));
        let leads = link.as_ref().is_none_or(|link| link.rank() == 0);
        let peers = link.as_ref().and_then(Link::peers);
        let part_rows = peers.map_or(0, |peers| peers.most() / hidden);
        let adds_from = if leads { part_rows + 1 } else { usize::MAX };
        Ok(Self {
            products: Products::new(device, config.norm_eps, choice, adds_from)?,
            x: rows_of(hidden)?,
            normed: rows_of(hidden)?,
            qkv: rows_of(qkv)?,
            attended: rows_of(q)?,
            gate_up: rows_of(2 * intermediate)?,
            activated: rows_of(intermediate)?,
            logits: device.zeros(2 * limits.logits * vocab)?,
            sampled: device.zeros(4 * limits.draws)?,
            best: device.zeros(8 * limits.draws)?,
            counters: device.zeros(4 * limits.draws)?,
            thresholds: device.zeros(4 * limits.draws)?,
            swapped: DeviceBuffer::of(&device.gpu, &swapped)?,
            rotated: None,
            chosen: None,
            gauge: None,
            fault: Fault::None,
            config,
            weights,
            link,
            part_rows,
            leads,
            limits,
        })
    }

    /// Whether this rank chooses tokens.
    pub fn leads(&self) -> bool {
        self.leads
    }

    /// Bytes of weights.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.bytes()
    }

    /// What connects this rank to the others.
    pub fn link(&self) -> Option<&Link> {
        self.link.as_ref()
    }

    /// The products' ways.
    pub fn products(&self) -> &Products {
        &self.products
    }

    /// Rows of logits that are made at a time.
    pub fn logits_rows(&self) -> usize {
        self.limits.logits
    }

    /// Where the logits lie: bf16 `[logits_rows, vocab]`.
    pub fn logits_address(&self) -> u64 {
        self.logits.address()
    }

    /// Rows of one new token, of which a step has at most so many, read `top` positions from now on.
    ///
    /// # Errors
    /// The driver's, where memory is short.
    pub fn read_sparsely(
        &mut self,
        device: &Device,
        top: u32,
        rows: usize,
    ) -> Result<(), GpuError> {
        self.chosen = Some(Chosen::new(device, top, (rows, self.config.kv_heads))?);
        Ok(())
    }

    /// Measures from now on what each channel of K is worth, of steps that no graph replays.
    ///
    /// # Errors
    /// The driver's, where memory is short.
    pub fn measure_channels(&mut self, device: &Device) -> Result<(), GpuError> {
        self.gauge = Some(Gauge::new(device, &self.config, padded_rows(self.limits.tokens))?);
        Ok(())
    }

    /// Whether that is measured.
    pub fn is_measuring(&self) -> bool {
        self.gauge.is_some()
    }

    /// What was measured, where it was; nothing is from now on.
    pub fn take_measured(&mut self) -> Option<Measured> {
        self.gauge.take().map(Gauge::measured)
    }

    /// Loads the kernels of what `work` names, of attention of this model's layers, and takes what the pool's stores do.
    ///
    /// # Errors
    /// Heads that no kernel serves, or the driver's.
    pub fn prepare(
        &mut self,
        device: &Device,
        backend: &mut Cuda,
        work: &Prepare<'_>,
    ) -> Result<(), GpuError> {
        let layout = backend.layout();
        let apart = layout.dtype().is_quantised() || layout.label_channels() > 0;
        if !(apart || self.is_measuring()) {
            self.rotated = None;
        } else if self.rotated.is_none() {
            let rows = padded_rows(self.limits.tokens);
            let row_bytes = 2 * (self.config.kv_heads * self.config.head_dim) as u64;
            self.rotated = Some(Rotated::new(device, rows, row_bytes)?);
        }
        let attend: Vec<_> = (0..self.config.layers).map(|layer| self.attend(layer)).collect();
        let top = self.chosen.as_ref().map(|chosen| chosen.top);
        let lists: Vec<_> =
            top.iter().flat_map(|&top| attend.iter().map(move |&a| (a, top))).collect();
        Ok(backend.prepare(&Prepare { attend: &attend, lists: &lists, ..*work })?)
    }

    /// Makes sums over ranks ready: kernels are loaded when they are first launched, and NCCL connects when it is first asked,
    /// neither of which is to be in a capture or while somebody waits. Every rank does so at the same time. Spoils x.
    ///
    /// # Errors
    /// The driver's or NCCL's.
    pub fn warm_sums(&self, device: &Device) -> Result<(), GpuError> {
        let Some(link) = &self.link else { return Ok(()) };
        let most = padded_rows(self.limits.tokens) * self.config.hidden;
        // SAFETY: no numbers need no memory, and x has that many; the device is this rank's.
        unsafe {
            if let Some(peers) = link.peers() {
                peers.add(device, 0, 0, 0)?;
            }
            // NCCL goes other ways for other lengths, and connects for each when it first does.
            for doubled in (0..).map(|times| 4096 << times).take_while(|&count| count < most) {
                link.sum(device, self.x.address(), doubled)?;
            }
            link.sum(device, self.x.address(), most)
        }
    }

    fn attend(&self, layer: usize) -> Attend {
        let ModelConfig { q_heads, head_dim, .. } = self.config;
        let window = self.config.windows[layer];
        Attend { window, ..Attend::new(q_heads as u32, head_dim as u32) }
    }

    /// Asks for a step of a staged plan, whose products are planned. Of steps with more draws than rows of logits,
    /// `each` is called after each part of them, with its first draw and their number.
    ///
    /// # Errors
    /// The driver's, cublasLt's or the backend's.
    pub fn run(
        &mut self,
        device: &Device,
        backend: &mut Cuda,
        (plan, staged): (&BatchPlan<'_>, StagedPlan),
        step: StepAddresses,
        parts: Parts,
        each: impl FnMut(usize, usize) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let tokens = plan.token_count();
        let layout = *backend.layout();
        let pool = backend.pool().address();
        if parts.small {
            self.embed(device, tokens, step.tokens)?;
        }
        for index in 0..self.config.layers {
            if parts.products {
                let mut operands = self.operands(Op::Qkv, index, tokens);
                if index == 0 {
                    // The embedding's kernel has done it.
                    (operands.x, operands.norm) = (operands.normed, 0);
                }
                self.product(device, Op::Qkv, tokens, operands)?;
            }
            if parts.small {
                let step = (tokens, staged, plan.slot_mapping);
                self.rotate_and_store(device, index, (&layout, pool), step)?;
                if let Some(Rotated { k, v, .. }) = &self.rotated {
                    if let Some(gauge) = &mut self.gauge {
                        gauge.look(device, plan, index, [self.qkv.address(), k.address()])?;
                    }
                    let layer = LayerId::new(self.stored_layer(index) as u32);
                    backend.store_cache(plan, layer, k.rows(0, None), v.rows(0, None))?;
                }
            }
            if parts.attention {
                self.attend_layer(backend, plan, index)?;
            }
            if parts.products {
                for op in [Op::Out, Op::GateUp, Op::Down] {
                    let operands = self.operands(op, index, tokens);
                    self.product(device, op, tokens, operands)?;
                    if op != Op::GateUp {
                        self.sum_up(device, tokens)?;
                    }
                }
            }
        }
        if self.leads {
            self.choose(device, step, parts, each)?;
        }
        self.share(device, step.draw_count)
    }

    /// Makes x what one GPU would have, of what the ranks have.
    fn sum_up(&self, device: &Device, tokens: usize) -> Result<(), GpuError> {
        let Some(link) = &self.link else { return Ok(()) };
        let (x, count) = (self.x.address(), tokens * self.config.hidden);
        // SAFETY: x and parts have room for the step's rows, and each rank asks for the same step.
        unsafe {
            match link.peers() {
                Some(peers) if self.are_parts(tokens) => {
                    peers.add(device, x, self.normed.address(), count)
                }
                _ => link.sum(device, x, count),
            }
        }
    }

    /// Gives all ranks the tokens that the first one chose, for the next step to read.
    fn share(&self, device: &Device, draws: usize) -> Result<(), GpuError> {
        match &self.link {
            // SAFETY: there is room for the step's draws, and each rank asks for the same step.
            Some(link) if draws > 0 => unsafe { link.share(device, self.sampled.address(), draws) },
            _ => Ok(()),
        }
    }

    fn embed(&self, device: &Device, tokens: usize, at: u64) -> Result<(), GpuError> {
        let hidden = self.config.hidden;
        let params = EmbedParams {
            table: self.weights.embedding,
            tokens: at,
            sampled: self.sampled.address(),
            x: self.x.address(),
            weight: self.weights.layers[0].attention_norm,
            normed: self.normed.address(),
            hidden: hidden as u32,
            eps: self.config.norm_eps,
        };
        let block = (hidden / 8).next_multiple_of(32) as u32;
        // SAFETY: the width was checked in `new`; tokens are below the vocabulary (the server checks requests, and
        // sampling gives no others); the buffers have room for the step.
        unsafe { device.kernels.embed.launch(device.raw(), (tokens as u32, 1), block, &params) }
    }

    fn attend_layer(
        &mut self,
        backend: &mut Cuda,
        plan: &BatchPlan<'_>,
        layer: usize,
    ) -> Result<(), GpuError> {
        let attend = self.attend(layer);
        let stride = Some(qkv_width(&self.config));
        // SAFETY: both buffers have room for the step's rows, and are touched in the stream's order alone.
        let (q, out) = unsafe {
            let q = DeviceRows::from_raw(self.qkv.address(), stride);
            (q, DeviceRowsMut::from_raw(self.attended.address(), None))
        };
        let layer = LayerId::new(layer as u32);
        match &mut self.chosen {
            Some(chosen) => chosen.attend(backend, (plan, layer), &attend, q, out),
            None => Ok(backend.attend(plan, layer, &attend, q, out, None)?),
        }
    }
}
