//! `--transport` of `mount` and `accelerate attach`: how the kernel reaches the data.

use burgeon_accelerator::control;
use burgeon_daemon::protocol::TransportRequest;
use clap::ValueEnum;

/// As [`TransportRequest`].
#[derive(ValueEnum, Clone, Copy, Debug)]
pub(crate) enum Transport {
    /// ublk where the kernel has it, else FUSE
    Auto,
    /// A ublk device, or an error
    Ublk,
    /// A FUSE file and a loop device
    Fuse,
}

impl From<Transport> for TransportRequest {
    fn from(transport: Transport) -> Self {
        match transport {
            Transport::Auto => Self::Auto,
            Transport::Ublk => Self::Ublk,
            Transport::Fuse => Self::Fuse,
        }
    }
}

impl From<Transport> for control::Transport {
    fn from(transport: Transport) -> Self {
        match transport {
            Transport::Auto => Self::Auto,
            Transport::Ublk => Self::Ublk,
            Transport::Fuse => Self::Fuse,
        }
    }
}
