//! The connections of a model's ranks. Short sums use peer memory if the GPUs can access each other's memory and the
//! caller does not request NCCL. All else uses NCCL.

use super::device::Device;
use super::error::GpuError;
use super::nccl::Comm;
use super::peers::Peers;

/// Transport of sums over GPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// A kernel that writes to the other GPUs' memory for short sums, and NCCL for the rest.
    Peer,
    /// NCCL for all sums.
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

/// A rank's connections to the other ranks.
#[derive(Debug)]
pub struct Link {
    comm: Comm,
    peers: Option<Peers>,
}

impl Link {
    /// Connects the first GPUs, one for each rank. Without a requested transport, sums use peer memory if possible.
    ///
    /// # Errors
    /// See [`Comm::connect`] and [`Peers::connect`]. A GPU that cannot access a peer is an error only if the caller
    /// requested peer memory.
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

    /// Returns this rank's number.
    pub fn rank(&self) -> usize {
        self.comm.rank
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.comm.ranks
    }

    /// Returns the transport of short sums.
    pub fn sums(&self) -> Transport {
        if self.peers.is_some() { Transport::Peer } else { Transport::Nccl }
    }

    /// Returns the peer memory for short sums, if they do not use NCCL.
    pub fn peers(&self) -> Option<&Peers> {
        self.peers.as_ref()
    }

    /// Replaces numbers in bf16 by their sums over all ranks, through NCCL.
    ///
    /// # Safety
    /// See [`Comm::all_reduce`].
    pub unsafe fn all_reduce(&self, device: &Device, x: u64, count: usize) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees the conditions.
        unsafe { self.comm.all_reduce(x, count, device.raw()) }
    }

    /// Replaces numbers of 32 bits by those of the first rank, through NCCL.
    ///
    /// # Safety
    /// See [`Comm::broadcast`].
    pub unsafe fn broadcast(&self, device: &Device, at: u64, count: usize) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees the conditions.
        unsafe { self.comm.broadcast(at, count, device.raw()) }
    }
}
