//! Finds out if this kernel bears that the file below a mounted file system is exchanged.
//!
//! ```text
//!   first use in this boot ─► a helper does it to a scratch file system (`exchange/probe.rs`)
//!                              └─► exchange.json of the state directory ◄── every later use
//! ```
//!
//! Invariant: nothing is exchanged for `burgeon let-go` unless an attempt of this boot has
//! succeeded (`crates/cli/tests/let_go.rs`). An attempt that fails for another reason, such as a
//! lack of loop devices, is no answer, and is made again at the next use.

use burgeon_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::{
    Supervisor,
    helper::{self, Outcome, Task},
};
use crate::{host::system, state::files};

/// The answer, which holds for one boot.
#[derive(Serialize, Deserialize)]
struct Tried {
    boot: String,
    can_exchange: bool,
}

impl Supervisor {
    /// True if the file below a mounted file system can be exchanged. The first call of a boot
    /// tries it.
    pub(super) fn can_exchange(&self) -> Result<bool> {
        if let Some(known) = self.known_exchange() {
            return Ok(known);
        }
        let can_exchange = match helper::run(&self.state, &Task::TryExchange, &[], || {}) {
            Ok((Outcome::Tried { can_exchange }, _)) => can_exchange,
            // It hangs: another attempt would, too.
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                tracing::error!(%error, "the exchange of a scratch file hangs: nothing is exchanged in this boot");
                false
            }
            Err(error) => return Err(error),
            Ok(_) => {
                let what = "unexpected answer from the process that tries an exchange";
                return Err(Error::new(ErrorKind::LocalIo, what));
            }
        };
        tracing::info!(can_exchange, "tried to exchange the file below a scratch file system");
        // Not knowing it later costs another attempt.
        let tried = Tried { boot: system::boot(), can_exchange };
        if let Err(error) = files::publish_json(&self.state.exchange_trial(), &tried) {
            tracing::warn!(%error, "the result of the attempt is not kept");
        }
        Ok(can_exchange)
    }

    /// The same for a mount that has lost its server: it cannot wait for an attempt, so without one
    /// the kernel's version decides.
    pub(super) fn may_reconnect(&self) -> bool {
        self.known_exchange().unwrap_or_else(system::is_before_shutdowns)
    }

    /// The result of an attempt in this boot.
    fn known_exchange(&self) -> Option<bool> {
        let tried = files::read_json::<Tried>(&self.state.exchange_trial()).ok()?;
        let boot = system::boot();
        (!boot.is_empty() && tried.boot == boot).then_some(tried.can_exchange)
    }
}
