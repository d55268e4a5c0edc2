//! Starts the daemon again if it has died below containers, and nothing else does.
//!
//! ```text
//!   no supervisor answers, no server serves, mounts are in use ─ twice in a row ─► start a daemon
//! ```
//!
//! systemd does the same for the daemon's unit, much sooner. Readers wait for it, and after some
//! minutes they would get I/O errors (`crates/cli/tests/native.rs`).

use std::{thread, time::Duration};

use burgeon_daemon::{
    Client, StateDir,
    doctor::{is_served_without_supervisor, mounts_let_go, mounts_without_daemon},
};

/// From one look to the next. Two take much longer than a daemon that is being replaced.
const LOOK: Duration = Duration::from_secs(5);
/// Longest pause after a daemon could not be started.
const PAUSE_MAX: Duration = Duration::from_secs(300);

/// Looks after the daemon for as long as the process lives.
pub(super) fn begin(state: StateDir) -> std::io::Result<()> {
    let looks_after = move || {
        let (mut pause, mut was_dead) = (LOOK, false);
        loop {
            thread::sleep(pause);
            let is_dead = is_dead(&state);
            pause = match is_dead && was_dead {
                false => LOOK,
                true => match Client::connect_or_start(&state) {
                    Ok(_) => {
                        eprintln!("burgeon: the daemon had died, and was started again");
                        LOOK
                    }
                    Err(error) => {
                        eprintln!("burgeon: the daemon has died, and cannot be started: {error}");
                        (pause * 2).min(PAUSE_MAX)
                    }
                },
            };
            was_dead = is_dead;
        }
    };
    thread::Builder::new().name("restart".into()).spawn(looks_after).map(drop)
}

/// True if mounts are in use that nobody serves, and that nobody has given up: a daemon that ends,
/// also by `burgeon shutdown --force`, removes its socket.
fn is_dead(state: &StateDir) -> bool {
    state.run().join("api.sock").exists()
        && matches!(Client::connect(state), Ok(None))
        && mounts_without_daemon(state) > mounts_let_go(state).len()
        && !is_served_without_supervisor(state)
}
