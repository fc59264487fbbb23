//! Launches one step on the device.
//!
//! ```text
//! embed | for each layer: qkv, rotate and store, attend, out, gate and up, down | logits, sample
//! ```
//!
//! `forward/` contains the operands of each product; biases, experts and norms of outputs; rotation and store; states
//! and gates; and the choice of tokens. `products.rs` computes products, `image.rs` uploads tokens, and `runner.rs`
//! orders steps.

mod experts;
mod operands;
mod sampling;
mod states;
mod store;

use std::rc::Rc;

use kvarena::backend::Queries;
use kvarena::backend::cuda::{Cuda, DeviceBuffer, DeviceRows, DeviceRowsMut, Prepare};
use kvarena::layout::Dtype;
use kvarena::{Attend, Backend, BatchPlan, LayerId};

use super::delta::projected_width;
use super::device::Device;
use super::error::GpuError;
use super::kernels::EmbedParams;
use super::products::{Choice, Op, Products, padded_rows};
use super::shape::check_shape;
use super::sparse::{Chosen, Gauge};
use super::sums::Link;
use super::weights::{Weights, pairs_of, qkv_stride, qkv_width};
use crate::config::ModelConfig;
use crate::sparse::channels::Measured;
use experts::Mixture;
use states::States;

/// A deliberate fault, to verify that a comparison with the CPU finds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum InjectedFault {
    /// No fault.
    #[default]
    None,
    /// K and V go to the pages of another layer.
    Page,
    /// Positions are 1 % too large.
    Position,
    /// Frequencies of neighbouring pairs are swapped.
    Rotary,
    /// The labels are other channels than those that were chosen.
    Labels,
}

/// The parts of a step to launch: all, unless their times are measured separately.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parts {
    /// Attention.
    pub attention: bool,
    /// Products, with norms, activations, biases, experts and sums over ranks.
    pub products: bool,
    /// Embedding, rotation and store, sampling.
    pub small: bool,
}

impl Parts {
    /// All parts.
    pub const ALL: Self = Self { attention: true, products: true, small: true };
}

/// Limits of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepLimits {
    /// Maximum number of tokens in a step.
    pub tokens: usize,
    /// Maximum number of rows of logits that a step computes at a time.
    pub logits: usize,
    /// Maximum number of tokens that are chosen in a step.
    pub draws: usize,
}

/// A model's weights, products and activations on the device.
#[derive(Debug)]
pub struct Forward {
    /// Shape of the model, or of the rank's share of it.
    pub config: ModelConfig,
    weights: Rc<Weights>,
    /// Connection to the other ranks, if there are any.
    link: Option<Link>,
    /// Maximum number of rows for which the ranks sum their output and down products in peer memory and add the sum to
    /// x. With more rows, the first rank adds its product to x, each other rank overwrites x with its product, and the
    /// ranks then sum x. If outputs are normed, `part_rows` is 0 and the ranks sum `output`.
    part_rows: usize,
    /// Whether this rank chooses tokens. Only the first rank does, because ranks may round differently.
    leads: bool,
    products: Products,
    limits: StepLimits,
    x: DeviceBuffer,
    normed: DeviceBuffer,
    qkv: DeviceBuffer,
    attended: DeviceBuffer,
    gate_up: DeviceBuffer,
    activated: DeviceBuffer,
    /// Output of attention or of the MLP, if the model norms it.
    output: Option<DeviceBuffer>,
    /// Present if layers have experts.
    mixture: Option<Mixture>,
    /// Present if layers keep a state.
    states: Option<States>,
    logits: DeviceBuffer,
    /// Chosen tokens, in the order of draws; the next step reads them.
    sampled: DeviceBuffer,
    best: DeviceBuffer,
    counters: DeviceBuffer,
    thresholds: DeviceBuffer,
    /// Frequencies with neighbours swapped, for [`InjectedFault::Rotary`].
    swapped: DeviceBuffer,
    /// Frequencies 1 % above the model's, for [`InjectedFault::Position`].
    stretched: DeviceBuffer,
    /// The positions that rows of one new token read, if they do not read all.
    chosen: Option<Chosen>,
    /// Measures channels, if the host requested it.
    gauge: Option<Gauge>,
    /// The deliberate fault.
    pub fault: InjectedFault,
}

/// Device addresses of a step's tokens, draws and results.
#[derive(Clone, Copy, Debug)]
pub struct StepAddresses {
    /// i32 tokens.
    pub tokens: u64,
    /// `DeviceDraw`s.
    pub draws: u64,
    /// Address of a word that contains the host address to which the kernels write the chosen tokens.
    pub host_tokens: u64,
    /// Number of draws, including padding.
    pub draw_count: usize,
    /// Whether top-k or top-p of a draw without a shape excludes tokens.
    pub filtered: bool,
    /// The `DeviceShape`s and `Edit`s, if a draw has a shape.
    pub shapes: Option<[u64; 2]>,
}

impl Forward {
    /// Allocates activations for steps up to `limits`, of a whole model or of a rank's share.
    ///
    /// # Errors
    /// The kernels do not support the shape, there is too little memory, or the driver or cublasLt failed.
    pub fn new(
        device: &Device,
        config: ModelConfig,
        weights: Rc<Weights>,
        limits: StepLimits,
        choice: Choice,
        link: Option<Link>,
    ) -> Result<Self, GpuError> {
        check_shape(&config)?;
        let rows = padded_rows(limits.tokens);
        let limits = StepLimits { logits: padded_rows(limits.logits), ..limits };
        let ModelConfig { hidden, intermediate, vocab, .. } = config;
        let (mut q, mut qkv) = (config.q_heads * config.head_dim, qkv_stride(&config));
        let mut mixed = 0;
        if let Some(delta) = &config.delta {
            (q, qkv) = (q.max(delta.value_width()), qkv.max(projected_width(delta)));
            mixed = delta.channels();
        }
        let norms_outputs = config.family.norms_outputs();
        let more = if norms_outputs { hidden } else { Mixture::width(&config) };
        let widths = [2 * hidden, qkv, q, 3 * intermediate, more, mixed].iter().sum::<usize>();
        let wanted = 2 * (rows * widths + limits.logits * vocab) as u64;
        let free = device.gpu.free_memory()?;
        if wanted > free {
            return Err(GpuError::Memory { wanted, free });
        }
        let rows_of = |width: usize| device.zeros(2 * rows * width);
        let mut swapped = pairs_of(&config, &config.rope);
        swapped.chunks_exact_mut(2).for_each(|pair| pair.swap(0, 1));
        let stretched: Vec<f32> = pairs_of(&config, &config.rope).iter().map(|f| 1.01 * f).collect();
        let leads = link.as_ref().is_none_or(|link| link.rank() == 0);
        let peers = link.as_ref().and_then(Link::peers);
        let part_rows = peers.map_or(0, |peers| peers.max_elements() / hidden);
        let adds_from = if leads && !norms_outputs { part_rows + 1 } else { usize::MAX };
        // If outputs are normed, the ranks must sum them before the norm.
        let part_rows = if norms_outputs { 0 } else { part_rows };
        Ok(Self {
            products: Products::new(device, &config, choice, adds_from)?,
            output: if norms_outputs { Some(rows_of(hidden)?) } else { None },
            mixture: Mixture::new(device, &config, rows)?,
            states: States::new(device, &config, rows)?,
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
            stretched: DeviceBuffer::of(&device.gpu, &stretched)?,
            chosen: None,
            gauge: None,
            fault: InjectedFault::None,
            config,
            weights,
            link,
            part_rows,
            leads,
            limits,
        })
    }

    /// Returns whether this rank chooses tokens.
    pub fn leads(&self) -> bool {
        self.leads
    }

    /// Returns the connection to the other ranks.
    pub fn link(&self) -> Option<&Link> {
        self.link.as_ref()
    }

    /// Returns the products and their chosen kernels.
    pub fn products(&self) -> &Products {
        &self.products
    }

    /// Returns the maximum number of rows of logits that a step computes at a time.
    pub fn logits_rows(&self) -> usize {
        self.limits.logits
    }

    /// Returns the address of the logits: bf16 `[logits_rows, vocab]`.
    pub fn logits_address(&self) -> u64 {
        self.logits.address()
    }

    /// From now on, rows of one new token read only `top` positions for each kv head. A step has at most `rows` such
    /// rows.
    pub fn read_sparsely(&mut self, device: &Device, top: u32, rows: usize) -> Result<(), GpuError> {
        self.chosen = Some(Chosen::new(device, top, (rows, self.config.kv_heads))?);
        Ok(())
    }

    /// Measures the importance of each channel of K from now on. The caller must not capture steps as graphs meanwhile.
    pub fn measure_channels(&mut self, device: &Device) -> Result<(), GpuError> {
        self.gauge = Some(Gauge::new(device, &self.config, padded_rows(self.limits.tokens))?);
        Ok(())
    }

    /// Returns whether channels are measured.
    pub fn is_measuring(&self) -> bool {
        self.gauge.is_some()
    }

    /// Ends the measurement and returns its result, if there was one.
    pub fn take_measured(&mut self) -> Option<Measured> {
        self.gauge.take().map(Gauge::measured)
    }

    /// Prepares the kernels for `work`, for the rotation and store, and for the attention of this model's layers.
    ///
    /// # Errors
    /// No kernel supports the heads, or the driver failed.
    pub fn prepare(&mut self, backend: &mut Cuda, work: &Prepare<'_>) -> Result<(), GpuError> {
        let layers = (0..self.config.layers).filter(|&layer| self.first_op(layer) == Op::Qkv);
        let attend: Vec<_> = layers.map(|layer| self.attend(layer)).collect();
        let top = self.chosen.as_ref().map(|chosen| chosen.top);
        let lists: Vec<_> = top.iter().flat_map(|&top| attend.iter().map(move |&a| (a, top))).collect();
        Ok(backend.prepare(&Prepare { attend: &attend, lists: &lists, rope_store: true, ..*work })?)
    }

    /// Prepares sums over ranks. A kernel reaches the device at its first launch, and NCCL connects at its first call;
    /// neither may happen in a capture or during a request. All ranks call this at the same time. Overwrites x.
    pub fn warm_sums(&self, device: &Device) -> Result<(), GpuError> {
        let Some(link) = &self.link else { return Ok(()) };
        let most = padded_rows(self.limits.tokens) * self.config.hidden;
        // SAFETY: a sum of no numbers accesses no memory, and x has `most` numbers; the device is this rank's.
        unsafe {
            if let Some(peers) = link.peers() {
                peers.add(device, 0, 0, 0)?;
            }
            // NCCL uses different algorithms for different lengths, and connects for each algorithm at its first use.
            for doubled in (0..).map(|times| 4096 << times).take_while(|&count| count < most) {
                link.all_reduce(device, self.x.address(), doubled)?;
            }
            link.all_reduce(device, self.x.address(), most)
        }
    }

    fn attend(&self, layer: usize) -> Attend {
        let ModelConfig { q_heads, head_dim, scale, .. } = self.config;
        let window = self.config.windows[layer];
        // The rope scales q and k by an amplitude. The rotation kernel does not, so the scale contains the amplitude's
        // square.
        let scale = scale * self.config.rope_of(layer).amplitude.powi(2);
        Attend { window, scale, ..Attend::new(q_heads as u32, head_dim as u32) }
    }

    /// Submits a step that the backend has begun and whose products are chosen. The rank that chooses tokens computes
    /// at most [`Forward::logits_rows`] draws at a time. After each such batch it calls `each` with the batch's first
    /// draw and its number of draws.
    ///
    /// # Errors
    /// The driver, cublasLt, NCCL, the backend or `each` failed.
    pub fn run(
        &mut self,
        device: &Device,
        backend: &mut Cuda,
        plan: &BatchPlan<'_>,
        step: StepAddresses,
        parts: Parts,
        each: impl FnMut(usize, usize) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let (tokens, hidden) = (plan.token_count(), self.config.hidden);
        if parts.small {
            self.embed(device, tokens, step.tokens)?;
        }
        for index in 0..self.config.layers {
            let first = self.first_op(index);
            if parts.products {
                let mut operands = self.operands(first, index, tokens);
                if index == 0 {
                    // The embedding kernel has normed x.
                    (operands.x, operands.norm) = (operands.normed, 0);
                }
                self.product(device, first, tokens, operands)?;
                let bias = self.weights.layers[index].qkv_bias;
                self.add_bias(device, (self.qkv.address(), bias), qkv_width(&self.config), tokens)?;
            }
            let keeps_state = first == Op::Delta;
            if parts.small && !keeps_state {
                self.rotate_and_store(backend, plan, index)?;
                if let Some(gauge) = &mut self.gauge {
                    gauge.measure(device, plan, index, self.qkv.address())?;
                }
            }
            if parts.attention && keeps_state {
                self.advance_states(device, backend, plan, index)?;
            } else if parts.attention {
                self.attend_layer(backend, plan, index)?;
                self.gate_attention(device, tokens)?;
            }
            if parts.products {
                let layer = self.weights.layers[index];
                let out = if keeps_state { Op::DeltaOut } else { Op::Out };
                let operands = self.operands(out, index, tokens);
                self.product(device, out, tokens, operands)?;
                self.sum_up(device, tokens)?;
                self.add_bias(device, (self.x.address(), layer.o_bias), hidden, tokens)?;
                self.add_output(device, layer.output_norms[0], tokens)?;
                if self.mixture.is_some() {
                    self.mix(device, index, tokens)?;
                } else {
                    for op in [Op::GateUp, Op::Down] {
                        let operands = self.operands(op, index, tokens);
                        self.product(device, op, tokens, operands)?;
                    }
                }
                self.sum_up(device, tokens)?;
                self.add_output(device, layer.output_norms[1], tokens)?;
            }
        }
        if self.leads {
            self.choose(device, step, parts, each)?;
        }
        self.broadcast(device, step.draw_count)
    }

    /// Completes x, or the output to norm, by a sum over the ranks. Except for rounding, the result equals that of one
    /// GPU.
    fn sum_up(&self, device: &Device, tokens: usize) -> Result<(), GpuError> {
        let Some(link) = &self.link else { return Ok(()) };
        let x = self.output.as_ref().unwrap_or(&self.x).address();
        let count = tokens * self.config.hidden;
        // SAFETY: x and parts have memory for the step's rows, and all ranks submit the same step.
        unsafe {
            match link.peers() {
                Some(peers) if self.are_parts(tokens) => peers.add(device, x, self.normed.address(), count),
                _ => link.all_reduce(device, x, count),
            }
        }
    }

    /// Sends the tokens chosen by the first rank to all ranks; the next step reads them.
    fn broadcast(&self, device: &Device, draws: usize) -> Result<(), GpuError> {
        match &self.link {
            // SAFETY: there is memory for the step's draws, and all ranks submit the same step.
            Some(link) if draws > 0 => unsafe { link.broadcast(device, self.sampled.address(), draws) },
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
            scale: self.config.embedding_scale,
            reserved: 0,
        };
        let block = (hidden / 8).next_multiple_of(32) as u32;
        // SAFETY: the width was checked in `new`; tokens are below the vocabulary (the server checks requests, and
        // sampling returns only such tokens); the buffers have memory for the step.
        unsafe { device.kernels.embed.launch(device.raw(), (tokens as u32, 1), block, &params) }
    }

    fn attend_layer(&mut self, backend: &mut Cuda, plan: &BatchPlan<'_>, layer: usize) -> Result<(), GpuError> {
        let attend = self.attend(layer);
        let (stride, dtype) = (qkv_stride(&self.config), backend.rows());
        let len = |buffer: &DeviceBuffer| (buffer.bytes() / u64::from(dtype.size())) as usize;
        let (sinks, q_heads) = (self.weights.layers[layer].sinks, self.config.q_heads);
        // SAFETY: both buffers live, and are accessed only in the stream's order; each head has a sink, or none has.
        let (rows, out, sinks) = unsafe {
            let (q, out) = (&self.qkv, &self.attended);
            let q = DeviceRows::from_raw(q.address(), dtype, len(q), Some(stride));
            let sinks = (sinks > 0).then(|| DeviceRows::from_raw(sinks, Dtype::F32, q_heads, None));
            (q, DeviceRowsMut::from_raw(out.address(), dtype, len(out), None), sinks)
        };
        let (layer, q) = (LayerId::new(layer as u32), Queries { rows, sinks });
        match &mut self.chosen {
            Some(chosen) => chosen.attend(backend, (plan, layer), &attend, q, out),
            None => Ok(backend.attend_queries(plan, layer, &attend, q, out, None)?),
        }
    }
}
