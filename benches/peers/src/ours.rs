//! kvarena's tree and pool, through `benches/cases`.

use kvarena::{PageId, TokenId};

use crate::Cache;
use crate::cases::{self, NAMESPACE};

pub const NAME: &str = "kvarena";

struct Ours(cases::Cache);

pub fn new(pages: usize, page_size: u32) -> Box<dyn Cache> {
    Box::new(Ours(cases::Cache::new(pages as u32, page_size)))
}

impl Cache for Ours {
    fn name(&self) -> &'static str {
        NAME
    }

    fn hit(&mut self, tokens: &[TokenId], out: &mut Vec<u32>) -> usize {
        let collect = |pages: &[PageId]| out.extend_from_slice(PageId::as_raw(pages));
        self.0.tree.match_pages(NAMESPACE, tokens, collect).pages() as usize
    }

    fn cycle(&mut self, tokens: &[TokenId]) -> usize {
        self.0.cycle(tokens) as usize
    }
}
