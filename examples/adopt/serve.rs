//! A scheduler in vLLM's form over any block manager: running requests first, prompts in chunks, and preemption of the
//! youngest request. The caller runs the model.

use std::collections::VecDeque;

use super::manager::{BlockManager, RequestId, Scheduled, StepInputs};

#[derive(Clone, Debug)]
pub struct Request {
    pub id: RequestId,
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Number of tokens with K and V.
    pub computed: usize,
    /// Number of tokens at which the request is finished.
    pub len: usize,
    /// Id of a second answer, which is forked after the first token.
    pub second: Option<RequestId>,
}

impl Request {
    pub fn new(id: RequestId, prompt: Vec<u32>, output: usize) -> Self {
        let (prompt_len, len) = (prompt.len(), prompt.len() + output);
        Self { id, tokens: prompt, prompt_len, computed: 0, len, second: None }
    }

    fn until(&self, end: usize) -> Scheduled<'_> {
        Scheduled { id: self.id, tokens: &self.tokens, start: self.computed, end }
    }

    /// Returns whether the first token is sampled and the prompt has K and V.
    fn is_answered(&self) -> bool {
        self.tokens.len() > self.prompt_len && self.computed + 1 == self.tokens.len()
    }
}

#[derive(Clone, Copy, Default, Debug)]
pub struct Counts {
    pub steps: usize,
    pub prompt_tokens: usize,
    pub hit_tokens: usize,
    pub preemptions: usize,
    pub forks: usize,
}

/// The step that a model runs: the block copies, then K and V of the new tokens, then the next token of each request
/// whose last known token is computed.
pub struct Step<'a> {
    pub batch: &'a [Scheduled<'a>],
    pub inputs: &'a StepInputs,
    /// `[requests, width]`.
    pub tables: &'a [u32],
    pub width: usize,
}

pub struct Scheduler<M> {
    pub manager: M,
    pub waiting: VecDeque<Request>,
    pub finished: Vec<Request>,
    pub counts: Counts,
    running: Vec<Request>,
    max_running: usize,
    step_tokens: usize,
    /// Width of the block tables.
    width: usize,
    inputs: StepInputs,
    tables: Vec<u32>,
}

impl<M: BlockManager> Scheduler<M> {
    /// Creates a scheduler of at most `max_running` requests and `step_tokens` new tokens a step. A row of the block
    /// tables has `width` blocks.
    pub fn new(manager: M, max_running: usize, step_tokens: usize, width: usize) -> Self {
        let (inputs, counts) = (StepInputs::default(), Counts::default());
        let (waiting, running, finished, tables) = (VecDeque::new(), Vec::new(), Vec::new(), Vec::new());
        Self { manager, waiting, finished, counts, running, max_running, step_tokens, width, inputs, tables }
    }

    pub fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Runs a step. `model` appends one token for each request of the batch; those of unfinished prompts are ignored.
    pub fn step(&mut self, model: &mut impl FnMut(&Step<'_>, &mut Vec<u32>)) {
        let mut ends: Vec<usize> = Vec::with_capacity(self.max_running);
        let mut left = self.step_tokens;
        let preemptions = self.counts.preemptions;
        while ends.len() < self.running.len() {
            let request = &self.running[ends.len()];
            let end = request.tokens.len().min(request.computed + left);
            if end == request.computed {
                break;
            }
            if self.manager.allocate_slots(request.id, &[], end) {
                left -= end - request.computed;
                ends.push(end);
            } else {
                self.preempt_last();
            }
        }
        while preemptions == self.counts.preemptions && left > 0 && ends.len() == self.running.len() && self.admit() {
            let request = self.running.last().expect("it is admitted");
            let end = request.tokens.len().min(request.computed + left);
            left -= end - request.computed;
            ends.push(end);
        }
        if !ends.is_empty() {
            self.run(&ends, model);
            self.fork();
            self.finish();
        }
    }

    /// Preempts the youngest request: it waits as a prompt of all its tokens.
    fn preempt_last(&mut self) {
        let mut last = self.running.pop().expect("a request runs");
        self.manager.free(last.id);
        last.computed = 0;
        self.waiting.push_front(last);
        self.counts.preemptions += 1;
    }

    /// Admits the oldest waiting request, with blocks for all its tokens.
    fn admit(&mut self) -> bool {
        let Some(request) = self.waiting.front_mut().filter(|_| self.running.len() < self.max_running) else {
            return false;
        };
        let hit = self.manager.get_computed_blocks(request.id, &request.tokens);
        if !self.manager.allocate_slots(request.id, &request.tokens, request.tokens.len()) {
            assert!(!self.running.is_empty(), "the pool holds one request");
            return false;
        }
        request.computed = hit;
        self.counts.prompt_tokens += request.tokens.len();
        self.counts.hit_tokens += hit;
        self.running.extend(self.waiting.pop_front());
        true
    }

    /// Computes the first running requests up to `ends`, and appends the sampled tokens.
    fn run(&mut self, ends: &[usize], model: &mut impl FnMut(&Step<'_>, &mut Vec<u32>)) {
        let batch: Vec<Scheduled<'_>> =
            self.running.iter().zip(ends).map(|(request, &end)| request.until(end)).collect();
        self.manager.schedule(&batch, &mut self.inputs);
        self.tables.resize(batch.len() * self.width, 0);
        self.manager.write_block_tables(self.width, &mut self.tables);
        let mut sampled = Vec::with_capacity(batch.len());
        let step = Step { batch: &batch, inputs: &self.inputs, tables: &self.tables, width: self.width };
        model(&step, &mut sampled);
        self.manager.cache_blocks(&batch);
        self.counts.steps += 1;
        for ((request, &end), token) in self.running.iter_mut().zip(ends).zip(sampled) {
            request.computed = end;
            if end < request.tokens.len() {
                continue;
            }
            request.tokens.push(token);
        }
    }

    /// Forks the second answers of requests that have a first token.
    fn fork(&mut self) {
        for at in 0..self.running.len() {
            let Some(second) = self.running[at].second.filter(|_| self.running[at].is_answered()) else { continue };
            self.running[at].second = None;
            let mut child = Request { id: second, ..self.running[at].clone() };
            if self.running.len() < self.max_running && self.manager.fork(self.running[at].id, second) {
                self.counts.forks += 1;
                self.running.push(child);
            } else {
                child.computed = 0;
                self.waiting.push_back(child);
            }
        }
    }

    /// Frees the finished requests.
    fn finish(&mut self) {
        let done = self.running.extract_if(.., |request| request.tokens.len() >= request.len);
        self.finished.extend(done.inspect(|request| self.manager.free(request.id)));
    }
}
