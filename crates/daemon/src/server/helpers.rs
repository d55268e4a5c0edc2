//! Credential helpers: the supervisor runs them, because this process may execute nothing.
//!
//! ```text
//!   login ── AskHelper, number ──► supervisor ── HelperSaid, number ──► the login that waits for it
//! ```
//!
//! Invariants (held by the tests below): an answer reaches the login that has asked for it, or
//! none; a login waits for [`WAIT_MAX`] at most, and no longer for a supervisor that has died.

use std::{
    collections::HashMap,
    sync::{Mutex, mpsc},
    time::Duration,
};

use burgeon_source::registry::Said;

use super::lock;

/// Longest wait for an answer: the supervisor gives a helper 30 s.
const WAIT_MAX: Duration = Duration::from_secs(40);

/// The questions to the supervisor.
#[derive(Default)]
pub(super) struct Helpers(Mutex<Questions>);

#[derive(Default)]
struct Questions {
    /// Numbers are never used again, so a late answer finds nobody.
    asked: u64,
    waiting: HashMap<u64, mpsc::Sender<Said>>,
}

impl Helpers {
    /// Asks by `send`, which gets the number of the question and returns false without a
    /// supervisor, and waits for the answer.
    pub(super) fn ask(&self, send: impl FnOnce(u64) -> bool) -> Said {
        let (sender, answer) = mpsc::channel();
        let number = {
            let mut questions = lock(&self.0);
            questions.asked += 1;
            let number = questions.asked;
            questions.waiting.insert(number, sender);
            number
        };
        let said = match send(number) {
            true => answer.recv_timeout(WAIT_MAX).unwrap_or_else(|_| {
                Err("the daemon did not answer for a credential helper".to_owned())
            }),
            false => Err("no daemon is there to run a credential helper".to_owned()),
        };
        lock(&self.0).waiting.remove(&number);
        said
    }

    /// Hands the answer to the login that waits for it.
    pub(super) fn answered(&self, number: u64, said: Said) {
        if let Some(waiting) = lock(&self.0).waiting.remove(&number) {
            // A login that has just given up takes no answer.
            let _ = waiting.send(said);
        }
    }

    /// The supervisor has died: nobody answers what it was asked.
    pub(super) fn supervisor_died(&self) {
        lock(&self.0).waiting.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::Helpers;

    #[test]
    fn each_login_gets_its_own_answer_and_late_ones_reach_nobody() {
        let helpers = Helpers::default();
        let (sent, numbers) = mpsc::channel();
        let ask = || helpers.ask(|number| sent.send((number, thread::current().id())).is_ok());
        let said: Vec<_> = thread::scope(|scope| {
            let logins = [0; 3].map(|_| scope.spawn(|| (thread::current().id(), ask())));
            let mut asked: Vec<_> = logins.iter().map(|_| numbers.recv().unwrap()).collect();
            asked.reverse();
            for (number, thread) in &asked {
                helpers.answered(*number, Ok(format!("{thread:?}")));
                helpers.answered(*number, Ok("late".to_owned()));
            }
            logins.map(|login| login.join().unwrap()).to_vec()
        });
        for (thread, said) in said {
            assert_eq!(said, Ok(format!("{thread:?}")));
        }
        // A later question has another number than all of these.
        let said = helpers.ask(|number| {
            (1..number).for_each(|earlier| helpers.answered(earlier, Ok("late".to_owned())));
            helpers.answered(number, Err("own".to_owned()));
            number == 4
        });
        assert_eq!(said, Err("own".to_owned()));
    }

    #[test]
    fn a_login_does_not_wait_for_a_supervisor_that_has_died() {
        let helpers = Helpers::default();
        let died = helpers.ask(|_| {
            helpers.supervisor_died();
            true
        });
        assert!(died.unwrap_err().contains("did not answer"));
        assert!(helpers.ask(|_| false).unwrap_err().contains("no daemon"));
        assert!(super::lock(&helpers.0).waiting.is_empty());
    }
}
