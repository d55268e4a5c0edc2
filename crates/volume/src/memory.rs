//! A file in memory for unit tests, which can be told to fail.

use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use burgeon_block::{Error, ErrorKind, LocalFile, Result};

pub(crate) struct Memory {
    bytes: Mutex<Vec<u8>>,
    pub(crate) fails: AtomicBool,
}

impl Memory {
    pub(crate) fn new(len: u64) -> Self {
        let bytes = Mutex::new(vec![0; len as usize]);
        Self { bytes, fails: AtomicBool::new(false) }
    }

    fn on(&self) -> Result<()> {
        match self.fails.load(Relaxed) {
            true => Err(Error::new(ErrorKind::LocalIo, "told to fail")),
            false => Ok(()),
        }
    }
}

impl LocalFile for Memory {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.on()?;
        buf.copy_from_slice(&self.bytes.lock().unwrap()[offset as usize..][..buf.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.on()?;
        self.bytes.lock().unwrap()[offset as usize..][..buf.len()].copy_from_slice(buf);
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}
