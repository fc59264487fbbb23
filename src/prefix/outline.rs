//! The structure of a tree as text, for people who debug a cache.
//!
//! Not here: the sizes of the tree (`tree/`).

use std::collections::HashMap;
use std::fmt;

use crate::error::Count;
use crate::id::{NodeKey, Scope};

use super::PrefixTree;

/// Maximum number of tokens that a line shows.
const TOKENS: usize = 8;

/// Writes a line for each namespace and for each node: its number of pages, whether it is locked, and its first tokens.
/// Lines of children follow their parent's, indented, by their tokens. O(nodes * log nodes).
pub(crate) fn write(tree: &PrefixTree, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut children = HashMap::<NodeKey, Vec<NodeKey>>::new();
    let mut first_nodes = Vec::new();
    for (node, link) in &tree.nodes.link {
        link.parent.map_or(&mut first_nodes, |parent| children.entry(parent).or_default()).push(node);
    }
    // The last item is written first.
    let first_page = |node: &NodeKey| tree.nodes.lists.first_page(&tree.nodes.link[*node].list);
    children.values_mut().for_each(|nodes| nodes.sort_by_key(|node| std::cmp::Reverse(first_page(node))));
    let place = |node: &NodeKey| {
        let Scope { namespace, generation } = tree.nodes.scope[*node];
        (generation, namespace, first_page(node))
    };
    first_nodes.sort_by(|a, b| place(b).cmp(&place(a)));
    let (mut rest, mut above): (Vec<_>, _) = (first_nodes.into_iter().map(|node| (node, 1)).collect(), None);
    while let Some((node, depth)) = rest.pop() {
        if depth == 1 && above != Some(tree.nodes.scope[node]) {
            let Scope { namespace, generation } = tree.nodes.scope[node];
            let state = if generation == tree.generation { "" } else { ", reset" };
            writeln!(f, "{namespace:?}{state}")?;
            above = Some(tree.nodes.scope[node]);
        }
        write_node(tree, node, depth, f)?;
        rest.extend(children.remove(&node).into_iter().flatten().map(|child| (child, depth + 1)));
    }
    Ok(())
}

fn write_node(tree: &PrefixTree, node: NodeKey, depth: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let pages = tree.nodes.entries(node);
    let state = if tree.usage[node].lock_count > 0 { ", locked" } else { "" };
    write!(f, "{:indent$}{}{state}:", "", Count(pages, "page"), indent = 2 * depth)?;
    let tokens = tree.nodes.pages(node).flat_map(|(tokens, _)| tokens);
    tokens.take(TOKENS).try_for_each(|token| write!(f, " {token:?}"))?;
    let is_cut = pages as usize * tree.nodes.page_size as usize > TOKENS;
    f.write_str(if is_cut { " ..\n" } else { "\n" })
}
