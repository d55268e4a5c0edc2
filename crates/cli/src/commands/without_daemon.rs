//! The words of a command that finds no daemon: mounts may have survived it.

use burgeon_daemon::doctor::{is_served_without_supervisor, mounts_let_go, mounts_without_daemon};

use super::Context;
use crate::output::counted;

/// "1 mount exists", "2 mounts exist".
pub(super) fn that_exist(mounts: usize) -> String {
    let verb = if mounts == 1 { "exists" } else { "exist" };
    format!("{} {verb}", counted(mounts as u64, "mount"))
}

/// Says which processes run, and how much is mounted.
pub(super) fn no_daemon(context: &Context) -> String {
    let root = context.state.root().display();
    if !context.state.exists() {
        return format!(
            "there is no state directory {root}, so no daemon runs, and nothing is mounted"
        );
    }
    let let_go = mounts_let_go(&context.state).len();
    match mounts_without_daemon(&context.state).saturating_sub(let_go) {
        0 if let_go > 0 => format!(
            "no daemon runs, and none is needed: {}, let go, which the kernel alone serves",
            that_exist(let_go)
        ),
        0 => format!("no daemon runs for {root}: nothing is mounted"),
        lost if is_served_without_supervisor(&context.state) => format!(
            "no supervisor runs, but {}, which a server goes on serving: `burgeon doctor --repair` \
             starts a supervisor",
            that_exist(lost)
        ),
        lost => format!(
            "no daemon runs, but {}: `burgeon doctor --repair` serves them again",
            that_exist(lost)
        ),
    }
}
