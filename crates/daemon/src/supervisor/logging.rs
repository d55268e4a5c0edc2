//! Changes level and format of the log while the daemon runs: here, in its server, and in its
//! opener. Processes that are started later inherit both.

use burgeon_block::{Error, ErrorKind, Result};

use super::Supervisor;
use crate::{
    ipc::link::ToServer,
    log::{self, LevelFilter},
    opener::ToOpener,
};

impl Supervisor {
    /// Changes what is given, and returns level and format.
    pub(super) fn change_log(
        &self,
        level: Option<&str>,
        json: Option<bool>,
    ) -> Result<(String, bool)> {
        let filter = level.map(str::parse::<LevelFilter>).transpose().map_err(|_| {
            let what = format!("there is no level {level:?}: take error, warn, info, debug or off");
            Error::new(ErrorKind::Invalid, what)
        })?;
        log::change(filter, json);
        let now = (log::given().unwrap_or(LevelFilter::INFO).to_string(), log::is_json());
        if level.is_some() || json.is_some() {
            tracing::info!(level = now.0, json = now.1, "the log was changed");
            let (level, json) = now.clone();
            let mut table = self.table();
            table.tell_opener(&ToOpener::Log { level: level.clone(), json });
            table.send(&ToServer::Log { level, json });
        }
        Ok(now)
    }
}
