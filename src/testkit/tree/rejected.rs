//! Calls that the tree must reject, and that change nothing.

use super::Program;
use crate::id::{Handle, PageId, TokenId};
use crate::testkit::rng::Rng;
use crate::tree::{Tree, TreeError};

impl Program {
    /// Makes an invalid insertion or extension.
    pub(super) fn reject(&mut self) {
        let prompt = self.prompt();
        if self.config.hashing.is_some() && !self.named.contains(&prompt.namespace) {
            return;
        }
        let known = self.model.longest(&prompt).tokens.len() / self.page_size();
        let count = prompt.tokens.len() / self.page_size();
        let Some(mut pages) = self.pages_for(known, count - known) else { return };
        let own = pages[known..].to_vec();
        self.free.extend(&own);
        let (mut tokens, page_size) = (prompt.tokens.clone(), self.config.page_size);
        let kind = self.rng.below(6);
        let at = known + self.rng.below(own.len().max(1) as u64) as usize;
        let seed = self.rng.below(256) as usize;
        let error = match kind {
            0 => {
                pages.push(PageId::new(0));
                TreeError::Length { tokens: tokens.len(), pages: pages.len(), page_size }
            }
            1 => {
                tokens.push(TokenId::new(0));
                TreeError::Length { tokens: tokens.len(), pages: pages.len(), page_size }
            }
            _ if own.is_empty() => return,
            2 => {
                let position = (at * self.page_size() + seed % self.page_size()) as u32;
                tokens[position as usize] = TokenId::PENDING;
                // Pages behind the placeholder may have been known; those before it are.
                TreeError::PendingToken { position }
            }
            3 => {
                pages[at] = PageId::new(self.rng.pick(&[self.config.pages, self.config.pages + 77, u32::MAX]));
                TreeError::Page { page: pages[at] }
            }
            4 if own.len() > 1 => {
                let other = if at == known { at + 1 } else { at - 1 };
                pages[at] = pages[other];
                TreeError::Page { page: pages[at] }
            }
            _ => {
                let Some(page) = self.model.any_page(seed) else { return };
                pages[at] = page;
                TreeError::Page { page }
            }
        };
        self.rejected(error, |tree| tree.insert(prompt.namespace, &tokens, &pages).map(|_| ()));
    }

    /// Makes a call that must fail, and checks that the tree is unchanged.
    pub(super) fn rejected(&mut self, want: TreeError, call: impl FnOnce(&mut Tree) -> Result<(), TreeError>) {
        let before = self.tree.to_string();
        assert_eq!(call(&mut self.tree), Err(want));
        assert_eq!(self.tree.to_string(), before, "a rejected call changes nothing");
        self.count(match want {
            TreeError::Gone { .. } => "gone",
            TreeError::NotLocked { .. } => "not locked",
            TreeError::NotEvictable { .. } => "not evictable",
            TreeError::Length { .. } => "length",
            TreeError::Page { .. } => "page",
            TreeError::PendingToken { .. } => "pending token",
            _ => "another error",
        });
    }

    /// Calls with numbers that no call has returned.
    pub(super) fn bad_handle(&mut self) {
        let valid = self.handle().to_raw();
        let flip = |rng: &mut Rng| if rng.one_in(3) { 0 } else { 1 << rng.below(64) };
        let raw = [valid[0] ^ flip(&mut self.rng), valid[1] ^ flip(&mut self.rng)];
        let handle = Handle::from_raw(raw);
        if handle == Handle::default() || self.model.names().contains_key(&handle) {
            return;
        }
        self.rejected(TreeError::Gone { handle }, |tree| tree.lock(handle));
        self.rejected(TreeError::Gone { handle }, |tree| tree.unlock(handle, &mut Vec::new()));
    }
}
