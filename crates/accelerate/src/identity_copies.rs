//! The identities of slow devices on the cache device: two copies each, of which the newer whole
//! one counts. The newest is written to both places, because a device would not be recognised by an
//! older one, if a sector of the newest rots.
//!
//! Invariant: a place is overwritten only when the other one durably has the newest whole copy.

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, LocalFile, Result};

use crate::{
    backing::SlowDevice,
    format::Block,
    identity::{Clean, FIRST, Identity, Stored, cut},
    keys::Key,
    sets::check_of,
    store::CacheStore,
};

impl<C: LocalFile> CacheStore<C> {
    /// The identity that is stored of a device.
    pub(crate) fn stored_identity(&self, device: u8) -> Result<Option<Stored>> {
        let mut newest: Option<Stored> = None;
        let mut block = Block::zeroed();
        for copy in 0..2 {
            self.file.read_at(self.layout.identity_at(device, copy), &mut block.0)?;
            let stored = Stored::decode(&block, device, self.id());
            if let Some(stored) = stored
                && newest.as_ref().is_none_or(|newest| newest.sequence < stored.sequence)
            {
                newest = Some(stored);
            }
        }
        Ok(newest)
    }

    /// Stores a changed identity, durably.
    pub(crate) fn put_identity(&self, device: u8, identity: &Identity) -> Result<()> {
        let _turn = self.lock_turn();
        let Some((block, sequence)) = identity.next_copy(device, self.id()) else { return Ok(()) };
        let at = |sequence| self.layout.identity_at(device, sequence);
        let stored = self.file.write_at(at(sequence), &block.0).and_then(|()| self.sync());
        self.overhead.note(Some(device), 2 * BLOCK_SIZE);
        stored.inspect_err(|_| identity.note_damaged(sequence))?;
        // Durable some time later: until then, only rot of the other copy is without a remedy.
        let second = self.file.write_at(at(sequence + 1), &block.0);
        second.unwrap_or_else(|error| {
            tracing::warn!(
                number = device,
                %error,
                "cannot write the second copy of a device's identity"
            );
        });
        Ok(())
    }

    /// Begins to keep an identity: reads the device.
    pub(crate) fn take_identity(
        &self,
        number: u8,
        identity: &Identity,
        device: &impl Clean,
    ) -> Result<()> {
        if self.layout.log_blocks == 0 {
            return Ok(());
        }
        if let Some(stored) = self.stored_identity(number)? {
            identity.go_on_from(stored.sequence);
        }
        identity.take(device);
        // An identity that is not stored is taken anew the next time.
        self.put_identity(number, identity).inspect_err(|_| identity.leave())
    }

    /// Goes on with the stored identity; false if there is none.
    pub(crate) fn adopt_identity(&self, number: u8, identity: &Identity) -> Result<bool> {
        let stored = self.stored_identity(number)?;
        Ok(stored.map(|stored| identity.adopt(stored)).is_some())
    }

    /// `Invalid` if `slow` is not the device that the stored identity describes; blocks that are
    /// left out are not compared.
    pub(crate) fn compare_identity(
        &self,
        number: u8,
        slow: &impl SlowDevice,
        is_left_out: impl Fn(u64) -> bool,
    ) -> Result<()> {
        let Some(stored) = self.stored_identity(number)? else {
            let what = "what the cache knows of the slow device is damaged";
            return Err(Error::new(ErrorKind::Corrupt, what));
        };
        let serial = cut(slow.serial().unwrap_or_default());
        if !serial.is_empty() && !stored.serial.is_empty() && serial != stored.serial {
            let what = format!("its serial number is {serial:?}, and was {:?}", stored.serial);
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let blocks = slow.size() / BLOCK_SIZE;
        let compared = |(block, _): &(&u64, &u32)| **block < blocks && !is_left_out(**block);
        let mut first = self.pages(FIRST.min(blocks) * BLOCK_SIZE)?;
        slow.read_at(0, first.bytes_mut())?;
        let mut page = self.pages(BLOCK_SIZE)?;
        for (block, check) in stored.samples.iter().filter(compared) {
            let at = block * BLOCK_SIZE;
            let bytes = match first.bytes().get(at as usize..(at + BLOCK_SIZE) as usize) {
                Some(bytes) => bytes,
                None => {
                    slow.read_at(at, page.bytes_mut())?;
                    page.bytes()
                }
            };
            if check_of(Key { device: number, block: *block }, bytes) != *check {
                let what = format!("its bytes {at} to {} differ", at + BLOCK_SIZE);
                return Err(Error::new(ErrorKind::Invalid, what));
            }
        }
        Ok(())
    }
}
