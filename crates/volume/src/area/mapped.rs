//! The map of an area, and the recorded checksums of mapped files. Both lie on a disk and may be
//! lost: then every read is an error, until they can be used.
//!
//! Invariant: opened files stay open, so a lookup waits for nobody (`tests/area.rs`).

use std::sync::{Mutex, OnceLock, PoisonError};

use burgeon_block::{Counter, Error, ErrorKind, Result};
use burgeon_image::{ExtentMap, extents::LogFile};

use crate::recorded::RecordedChecksums;

/// Both files, open.
pub(super) struct Mapped<F, L> {
    pub(super) map: ExtentMap<L>,
    pub(super) recorded: RecordedChecksums<F>,
}

type Open<F, L> = Box<dyn Fn() -> Result<Mapped<F, L>> + Send + Sync>;

/// Both files, as soon as they can be used.
pub(super) struct MappedSlot<F, L> {
    /// The area's name in events of the log.
    name: String,
    size: u64,
    mapped: OnceLock<Mapped<F, L>>,
    /// Tries to open it; `None` if it is open.
    open: Option<Open<F, L>>,
    problem: Mutex<Option<String>>,
    lost_reads: Counter,
}

impl<F, L: LogFile> MappedSlot<F, L> {
    /// The files of an area of `size` bytes; if they cannot be opened now, [`Self::refresh`]
    /// tries again.
    pub(super) fn open(name: String, size: u64, open: Open<F, L>) -> Self {
        let slot = Self {
            name,
            size,
            mapped: OnceLock::new(),
            open: Some(open),
            problem: Mutex::default(),
            lost_reads: Counter::default(),
        };
        slot.try_open();
        slot
    }

    /// Files that are open.
    pub(super) fn of(mapped: Mapped<F, L>) -> Self {
        Self {
            name: String::new(),
            size: mapped.map.size(),
            mapped: mapped.into(),
            open: None,
            problem: Mutex::default(),
            lost_reads: Counter::default(),
        }
    }

    fn try_open(&self) {
        let Some(open) = &self.open else { return };
        let opened = open().and_then(|mapped| match mapped.map.size() {
            size if size == self.size => Ok(mapped),
            size => Err(Error::new(
                ErrorKind::Corrupt,
                format!("the extent map is of {size} bytes, and this area has {}", self.size),
            )),
        });
        let problem = match opened {
            Ok(mapped) => {
                self.mapped.get_or_init(|| mapped);
                None
            }
            Err(error) => Some(error.to_string()),
        };
        let mut known = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        // It is tried again at each new mapping: only a change is an event.
        if let Some(error) = problem.as_deref().filter(|_| problem != *known) {
            tracing::error!(
                area = self.name,
                size = self.size,
                error,
                "mapped content cannot be read"
            );
        }
        *known = problem;
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Why it cannot be used.
    pub(super) fn problem(&self) -> Option<String> {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads that failed because of that.
    pub(super) fn lost_reads(&self) -> u64 {
        self.lost_reads.get()
    }

    pub(super) fn get(&self) -> Option<&Mapped<F, L>> {
        self.mapped.get()
    }

    /// The map, to look at; `Corrupt` if it cannot be used.
    pub(super) fn map(&self) -> Result<&ExtentMap<L>> {
        self.mapped.get().map(|mapped| &mapped.map).ok_or_else(|| {
            let why = self.problem().unwrap_or_default();
            Error::new(ErrorKind::Corrupt, format!("mapped content cannot be read: {why}"))
        })
    }

    /// The same for a read, which is counted if it fails.
    pub(super) fn map_for_read(&self) -> Result<&ExtentMap<L>> {
        self.map().inspect_err(|_| self.lost_reads.add(1))
    }

    /// Sees new mappings, and a map that can be used again.
    pub(super) fn refresh(&self) -> Result<()> {
        if self.mapped.get().is_none() {
            self.try_open();
        }
        self.mapped.get().map_or(Ok(()), |mapped| mapped.map.refresh())
    }
}
