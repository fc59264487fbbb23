//! The store of a replay. It makes puts and fetches on the engine and on the model, and compares the results. If the
//! backend has bytes, the store also checks that the bytes of a put's page do not change.

use super::agree;
use super::bytes::Inspect;
use super::host::{Host, OpenFetch, OpenPut, names};
use crate::error::EngineError;
use crate::hash::PageHash;
use crate::id::{Namespace, SwapPageId, TokenId};
use crate::moves::PutId;
use crate::testkit::model::PutWant;
use crate::testkit::op::Prompt;

struct Got {
    id: PutId,
    key: PageHash,
    parent: Option<PageHash>,
    tokens: Vec<TokenId>,
    page: SwapPageId,
}

impl<B: Inspect> Host<B> {
    pub(super) fn puts(&mut self, most: u8) -> Result<(), String> {
        let mut got = Vec::new();
        let answer = self.engine.puts(usize::from(most % 8), |put| {
            let (id, key, parent, page) = (put.id, put.key, put.parent, put.page);
            got.push(Got { id, key, parent, tokens: put.tokens.to_vec(), page });
        });
        let moves = self.engine.backend_mut().take_moves();
        if let Err(error) = self.model.check_groups() {
            let got = match answer {
                Err(EngineError::Core(error)) => Err(error),
                _ => Ok(()),
            };
            return self.check_result("puts", &got, &Err(error));
        }
        let moved_failed = answer.is_err() && moves.last() != Some(&true);
        let saved = (!moved_failed).then(|| self.engine.backend_mut().last_moved().saved.raw());
        self.model.expect_moves(moves);
        let want = self.model.puts((most % 8).into(), saved);
        let count = want.as_ref().map(Vec::len);
        self.summary.count(format!("puts {}", if count.is_some() { "Ok" } else { "Backend" }));
        agree("puts", &answer.ok(), &count)?;
        agree("puts given", &got.len(), &count.unwrap_or(0))?;
        got.into_iter().zip(want.into_iter().flatten()).try_for_each(|(got, want)| {
            self.compare_put(&got, &want)?;
            let bytes = self.engine.backend_mut().read_swap(got.page);
            let (key, number) = ((want.path.1, got.key), want.number);
            self.store.puts.push(OpenPut { id: got.id, number, key, page: got.page, bytes });
            Ok(())
        })
    }

    fn compare_put(&self, got: &Got, want: &PutWant) -> Result<(), String> {
        let shape = self.engine.shape();
        let hashing = shape.hashing.ok_or("puts need hashes")?;
        let (namespace, _, tokens) = &want.path;
        let names = names(Namespace::new(*namespace));
        let chain = hashing.chain(&names, tokens, shape.layout.page_size());
        agree("a put's key", &Some(&got.key), &chain.last())?;
        agree("a put's parent", &got.parent.as_ref(), &chain.iter().rev().nth(1))?;
        let page = &tokens[tokens.len() - self.page_size()..];
        agree("a put's tokens", &&got.tokens[..], &page)?;
        let staged = got.page.raw() >= shape.layout.swap_pages();
        agree("a put's page", &Some(got.page).filter(|_| !staged), &want.swap_page)
    }

    pub(super) fn put_done(&mut self, pick: u8, ok: bool) -> Result<(), String> {
        if self.store.puts.is_empty() {
            return Ok(());
        }
        let at = usize::from(pick) % self.store.puts.len();
        let OpenPut { id, number, key, page, bytes } = self.store.puts.remove(at);
        let now = self.engine.backend_mut().read_swap(page);
        agree("the bytes that a put reads", &now, &bytes)?;
        let got = [(); 2].map(|()| self.engine.put_done(id, ok));
        let want = [(); 2].map(|()| self.model.put_done(number, ok));
        self.summary.count(format!("put_done {ok}"));
        if ok {
            self.store.pages.insert(key, bytes);
        }
        agree("put_done", &got, &want)
    }

    pub(super) fn fetch(&mut self, spec: &Prompt, most: u8) -> Result<(), String> {
        let ((namespace, prompt), most) = (self.prompt(spec), u32::from(most % 6));
        let mut moved = Some(());
        let got = match self.engine.fetch(namespace, &prompt, most) {
            Ok(fetch) => Ok(fetch.map(|f| (f.id, f.cached_pages, f.pages.to_vec()))),
            Err(EngineError::Core(error)) => Err(error),
            Err(_) => {
                self.summary.count("fetch Backend".to_owned());
                moved = None;
                Ok(None)
            }
        };
        let moved = moved.map(|()| self.engine.backend_mut().last_moved());
        let want = self.model.fetch(namespace, &prompt, most, moved);
        let pages = got.clone().map(|got| got.map(|(_, cached, pages)| (cached, pages)));
        self.check_result("fetch", &pages, &want)?;
        let Ok(Some((id, cached, pages))) = got else { return Ok(()) };
        self.summary.count("fetch of pages".to_owned());
        let shape = self.engine.shape();
        let hashing = shape.hashing.ok_or("fetches need hashes")?;
        let chain = hashing.chain(&names(namespace), &prompt, shape.layout.page_size());
        let mut arrived = 0;
        for (&page, &key) in pages.iter().zip(&chain[cached as usize..]) {
            let Some(bytes) = self.store.pages.get(&(self.store.generation, key)) else { break };
            let bytes = bytes.as_deref().unwrap_or_default();
            self.engine.backend_mut().write_swap(page, bytes);
            arrived += 1;
        }
        self.store.fetch_count += 1;
        self.store.fetches.push(OpenFetch { id, number: self.store.fetch_count, arrived });
        Ok(())
    }

    pub(super) fn fetched(&mut self, pick: u8, count: u8) -> Result<(), String> {
        if self.store.fetches.is_empty() {
            return Ok(());
        }
        let at = usize::from(pick) % self.store.fetches.len();
        let OpenFetch { id, number, arrived } = self.store.fetches.remove(at);
        let short = usize::from(count / 2) % (arrived + 1);
        let count = if count.is_multiple_of(2) { arrived } else { short } as u32;
        let got = [(); 2].map(|()| self.engine.fetched(id, count));
        let want = [(); 2].map(|()| self.model.fetched(number, count));
        self.summary.count("fetched".to_owned());
        agree("fetched", &got, &want)
    }

    /// Ends all open fetches and puts.
    pub(super) fn close_store(&mut self) -> Result<(), String> {
        while !self.store.fetches.is_empty() {
            self.fetched(0, 0).and_then(|()| self.compare())?;
        }
        while !self.store.puts.is_empty() {
            self.put_done(0, true).and_then(|()| self.compare())?;
        }
        Ok(())
    }
}
