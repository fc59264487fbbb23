//! Reasons for which a reader does not accept a record.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! misses {
    ($($(#[doc = $doc:literal])* $name:ident $text:literal;)*) => {
        /// The reason for which a reader does not accept a record. The host computes the tokens instead.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[non_exhaustive]
        pub enum Miss {
            $($(#[doc = $doc])* $name,)*
        }

        impl Miss {
            /// All reasons.
            pub const ALL: &[Miss] = &[$(Miss::$name),*];

            /// Returns the reason in few words, as counters name it.
            pub fn text(self) -> &'static str {
                match self { $(Miss::$name => $text),* }
            }
        }
    };
}

misses! {
    /// The store does not have the record (any more).
    Absent "absent";
    /// The store did not return in time.
    Late "late";
    /// The store failed.
    Failed "failed";
    /// Another user owns the file, or it is a link or a folder.
    Foreign "foreign";
    /// The record is shorter or longer than its fields require.
    Length "length";
    /// The record does not begin with the magic number.
    Magic "magic";
    /// The record has another version of the format.
    Version "version";
    /// The record has flags that this version does not define.
    Flags "flags";
    /// The record has a keyed check and the reader no secret, or the reverse.
    Secret "secret";
    /// Fields of the record contradict one another, or reserved fields are not zero.
    Malformed "malformed";
    /// The check of the header, the page checks and the tokens fails.
    HeadCheck "head check";
    /// The check of a page fails.
    PageCheck "page check";
    /// Another model, weights, type, range of layers or heads.
    Fingerprint "fingerprint";
    /// Another namespace.
    Space "space";
    /// Another group of layers.
    Group "group";
    /// Another page size, or number or length of pages.
    Sizes "sizes";
    /// Another place in the prompt.
    Place "place";
    /// Another page before the first one.
    Parent "parent";
    /// Another key.
    Key "key";
    /// Other tokens than the prompt's.
    Tokens "tokens";
}

impl Miss {
    /// Returns whether no reader of any version can accept the record under its name, so a host may remove it.
    pub fn is_damage(self) -> bool {
        !matches!(
            self,
            Self::Absent | Self::Late | Self::Failed | Self::Foreign | Self::Version | Self::Flags | Self::Secret
        )
    }
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// The number of misses for each reason.
#[derive(Debug)]
pub struct Misses([AtomicU64; Miss::ALL.len()]);

impl Default for Misses {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Misses {
    /// Counts a miss.
    pub fn add(&self, miss: Miss) {
        self.0[miss as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of misses for a reason.
    pub fn get(&self, miss: Miss) -> u64 {
        self.0[miss as usize].load(Ordering::Relaxed)
    }

    /// Returns the reasons with misses, and their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (Miss, u64)> + '_ {
        Miss::ALL.iter().map(|&miss| (miss, self.get(miss))).filter(|&(_, count)| count > 0)
    }
}
