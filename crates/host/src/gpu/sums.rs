//! What connects the ranks of a model: short sums go over memory that they share, where their GPUs reach each other's;
//! everything else through NCCL.

use super::device::Device;
use super::error::GpuError;
use super::nccl::Comm;
use super::peers::Peers;

/// How sums over GPUs are computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// A kernel that writes to the other GPUs' memory, where sums are short; NCCL for the rest.
    Peer,
    /// NCCL.
    Nccl,
}

impl Transport {
    /// Returns the name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Nccl => "nccl",
        }
    }
}

/// One rank's end of what connects them all.
#[derive(Debug)]
pub struct Link {
    comm: Comm,
    peers: Option<Peers>,
}

impl Link {
    /// Connects the first GPUs, a rank each; without a wish for sums over peers where they can be made.
    ///
    /// # Errors
    /// As [`Comm::connect`] and [`Peers::connect`]; but that a GPU does not reach another one is an error only where sums
    /// over peers are wished for.
    pub fn connect(ranks: usize, sums: Option<Transport>) -> Result<Vec<Self>, GpuError> {
        let comms = Comm::connect(ranks)?;
        let none = || (0..ranks).map(|_| None).collect();
        let peers: Vec<Option<Peers>> = match sums {
            Some(Transport::Nccl) => none(),
            wish => match Peers::connect(&(0..ranks as u32).collect::<Vec<_>>()) {
                Ok(peers) => peers.into_iter().map(Some).collect(),
                Err(GpuError::NoPeer { .. }) if wish.is_none() => none(),
                Err(error) => return Err(error),
            },
        };
        Ok(comms.into_iter().zip(peers).map(|(comm, peers)| Self { comm, peers }).collect())
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.comm.rank
    }

    /// How many there are.
    pub fn ranks(&self) -> usize {
        self.comm.ranks
    }

    /// What short sums go over.
    pub fn sums(&self) -> Transport {
        if self.peers.is_some() { Transport::Peer } else { Transport::Nccl }
    }

    /// What short sums are made over, if not through NCCL too.
    pub fn peers(&self) -> Option<&Peers> {
        self.peers.as_ref()
    }

    /// Replaces numbers in bf16 by their sums over all ranks, through NCCL.
    ///
    /// # Errors
    /// NCCL's.
    ///
    /// # Safety
    /// As [`Comm::sum`].
    pub unsafe fn sum(&self, device: &Device, x: u64, count: usize) -> Result<(), GpuError> {
        // SAFETY: the caller's.
        unsafe { self.comm.sum(x, count, device.raw()) }
    }

    /// Replaces numbers of 32 bits by those of the first rank, through NCCL.
    ///
    /// # Errors
    /// NCCL's.
    ///
    /// # Safety
    /// As [`Comm::share`].
    pub unsafe fn share(&self, device: &Device, at: u64, count: usize) -> Result<(), GpuError> {
        // SAFETY: the caller's.
        unsafe { self.comm.share(at, count, device.raw()) }
    }
}
