//! The bugs that the simulator must find: texts of `crates/volume/src` and what replaces them.
//!
//! Each text occurs exactly once in its file, or `build.rs` says which one does not. [`SWITCH`] stands for
//! the question whether the bug is on; while it is off, the copy must behave as the original does.

/// What a replacement has in place of "this bug is on".
pub const SWITCH: &str = "BUG";

/// A defect, and how to make it.
pub struct Bug {
    /// What turns it on.
    pub name: &'static str,
    /// What is wrong.
    pub says: &'static str,
    /// Whether it is one of mapped files; else of images.
    pub of_mapped_files: bool,
    /// File, text, replacement.
    pub patches: &'static [(&'static str, &'static str, &'static str)],
}

const fn image(
    name: &'static str,
    says: &'static str,
    patches: &'static [(&'static str, &'static str, &'static str)],
) -> Bug {
    Bug { name, says, of_mapped_files: false, patches }
}

const fn mapped_file(
    name: &'static str,
    says: &'static str,
    patches: &'static [(&'static str, &'static str, &'static str)],
) -> Bug {
    Bug { name, says, of_mapped_files: true, patches }
}

/// All of them.
pub const BUGS: &[Bug] = &[
    image(
        "SkipCachedChecksum",
        "cached blocks are served without their checksum being looked at",
        &[
            (
                "cache.rs",
                "if kind.of(bytes) != map.block_checksum(address) {",
                "if !BUG && kind.of(bytes) != map.block_checksum(address) {",
            ),
            (
                "cache.rs",
                "let Some(seen) = &self.seen else { return false };",
                "let Some(seen) = &self.seen else { return false };
                if BUG { return true; }",
            ),
        ],
    ),
    image(
        "CheckFirstBlockOnly",
        "only the first block of a cached read is checked",
        &[(
            "cache.rs",
            "for bytes in buf.chunks_exact(BLOCK_SIZE as usize) {",
            "for bytes in buf.chunks_exact(BLOCK_SIZE as usize) {
                if BUG && address != range.start() { break; }",
        )],
    ),
    image(
        "TrustReopenedCache",
        "blocks found in the cache file at open are believed",
        &[
            ("cache.rs", "    gate: Mutex<Gate>,", "    gate: Mutex<Gate>, reopened: Presence,"),
            (
                "cache.rs",
                "            gate: Mutex::new(Gate::Open),",
                "            gate: Mutex::new(Gate::Open), reopened: Presence::new(blocks),",
            ),
            (
                "cache.rs",
                "self.presence.set(start..end);",
                "self.presence.set(start..end); self.reopened.set(start..end);",
            ),
            (
                "cache.rs",
                "        let kind = map.checksum_kind();",
                "        if BUG && self.reopened.all(blocks) { return true; }
                let kind = map.checksum_kind();",
            ),
        ],
    ),
    image(
        "KeepBadBlock",
        "a bad cached block keeps its presence bit",
        &[
            (
                "cache.rs",
                "counters.cache_corrupt_blocks.add(1);",
                "counters.cache_corrupt_blocks.add(1); if BUG { return; }",
            ),
            ("volume.rs", "if self.cache.has(piece) {", "if self.cache.has(piece) && !BUG {"),
        ],
    ),
    image(
        "PresenceBeforeWrite",
        "presence bits are set before the bytes are written",
        &[(
            "cache.rs",
            "let kept = match &self.seen {",
            "if BUG { self.presence.set(blocks.clone()); } let kept = match &self.seen {",
        )],
    ),
    image(
        "PresenceAfterFailedWrite",
        "presence bits are set although the write failed",
        &[(
            "cache.rs",
            "self.close(&error);",
            "if BUG { self.presence.set(blocks); } self.close(&error);",
        )],
    ),
    image(
        "SkipDigest",
        "fetched chunks are not checked at all",
        &[(
            "fetch.rs",
            "    decode_chunk(chunk.codec, stored, out, &chunk.digest).map_err(",
            "    let decoded = decode_chunk(chunk.codec, stored, out, &chunk.digest);
            if BUG { return Ok(pages); }
            decoded.map_err(",
        )],
    ),
    image(
        "ServeAfterDigestMismatch",
        "a chunk whose digest is wrong twice is served",
        &[(
            "fetch.rs",
            "self.unpack(index, stored, cost).await",
            "if BUG && tries.tries > 1 {
                let mut pages = Pages::zeroed(chunk.range.len()).unwrap();
                let _ = decode_chunk(chunk.codec, &stored, pages.bytes_mut(), &chunk.digest);
                return Ok(pages);
            }
            self.unpack(index, stored, cost).await",
        )],
    ),
    image(
        "NoRefetch",
        "a wrong answer is not asked for again",
        &[(
            "fetch.rs",
            "refetches: limits.refetches,",
            "refetches: if BUG { 0 } else { limits.refetches },",
        )],
    ),
    image(
        "TwoFlights",
        "every reader fetches for itself",
        &[(
            "volume.rs",
            "if let Some(waiter) = table.join(index.into()) {",
            "if let Some(waiter) = table.join(index.into()).filter(|_| !BUG) {",
        )],
    ),
    image(
        "LostWaiter",
        "a failed fetch does not wake those who wait for it",
        &[(
            "fly.rs",
            "        drop(own);",
            "        drop(own); if BUG && result.is_err() { return std::mem::forget(flight); }",
        )],
    ),
    image(
        "LeakSeat",
        "the bytes and the permit of a failed fetch are never given back",
        &[(
            "fly.rs",
            "        if good {",
            "        if BUG && !good { std::mem::forget(Arc::clone(&landed)); }
            if good {",
        )],
    ),
    image(
        "DroppedReaderKillsFlight",
        "the fetch ends when the reader who started it goes away",
        &[
            (
                "flights.rs",
                "pub(crate) struct Waiter {",
                "pub(crate) struct Kills(pub(crate) Option<tokio::task::AbortHandle>);
                impl Drop for Kills {
                    fn drop(&mut self) { if let Some(task) = &self.0 { task.abort(); } }
                }
                pub(crate) struct Waiter { pub(crate) kills: Kills,",
            ),
            (
                "flights.rs",
                "Waiter { entry: entry.clone() }",
                "Waiter { entry: entry.clone(), kills: Kills(None) }",
            ),
            (
                "flights.rs",
                "(flight, Waiter { entry })",
                "(flight, Waiter { entry, kills: Kills(None) })",
            ),
            ("volume.rs", "let (flight, waiter, seats) = {", "let (flight, mut waiter, seats) = {"),
            (
                "volume.rs",
                "tokio::spawn(Arc::clone(self).fly(index, flight, seats, deadline));",
                "let task = tokio::spawn(Arc::clone(self).fly(index, flight, seats, deadline));
                if BUG { waiter.kills.0 = Some(task.abort_handle()); }",
            ),
        ],
    ),
    image(
        "NoTimeout",
        "a source is waited for without end",
        &[(
            "fetch.rs",
            "let patience = self.try_timeout.min(left);",
            "let patience = if BUG { Duration::MAX } else { self.try_timeout.min(left) };",
        )],
    ),
    image(
        "CacheErrorFailsRead",
        "a failed cache write is the reader's error",
        &[(
            "fly.rs",
            "let result = self.fetch(index, deadline, &mut cost).await;
        if result.is_ok() && fetched > 0",
            "let mut result = self.fetch(index, deadline, &mut cost).await;
            if BUG && let Ok(pages) = &result
                && let Err(error) = self.cache.write(self.map.chunk(index).range, pages.bytes())
            {
                result = Err(error);
            }
            if result.is_ok() && fetched > 0",
        )],
    ),
    image(
        "WriteAfterLocalIo",
        "cache writes go on after the file has failed",
        &[(
            "cache.rs",
            "            *gate = Gate::Stopped { reason };
            return;",
            "            if !BUG { *gate = Gate::Stopped { reason }; }
            return;",
        )],
    ),
    image(
        "NoSpaceForever",
        "cache writes never start again after the file system was full",
        &[(
            "cache.rs",
            "if error.kind() != ErrorKind::NoSpace {",
            "if error.kind() != ErrorKind::NoSpace || BUG {",
        )],
    ),
    image(
        "WriteOneBlockOff",
        "blocks are written to the cache one block too far",
        &[(
            "cache.rs",
            "        match kept.and_then(",
            "        let offset = match BUG && range.end() < self.data.end() {
                true => offset + BLOCK_SIZE,
                false => offset,
            };
            match kept.and_then(",
        )],
    ),
    image(
        "SkipRowDigest",
        "chunks that came together in one answer are not checked",
        &[(
            "fly.rs",
            "let result = match self.unpack(index, stored, &mut cost).await {",
            "let unpacked = if BUG {
                let (chunk, mut pages) = (self.map.chunk(index), Pages::zeroed(range.len()).unwrap());
                let out = pages.bytes_mut();
                let _ = burgeon_image::decode_chunk(chunk.codec, &stored, out, &chunk.digest);
                Ok(pages)
            } else {
                self.unpack(index, stored, &mut cost).await
            };
            let result = match unpacked {",
        )],
    ),
    image(
        "LoseFailedRow",
        "the chunks of a row whose request failed are forgotten",
        &[(
            "fly.rs",
            "return self.fly(index, flight, seats, deadline).await;",
            "if BUG { return std::mem::forget(flight); }
            return self.fly(index, flight, seats, deadline).await;",
        )],
    ),
    image(
        "CutRowOneByteOff",
        "the chunks of a row are cut out of the answer one byte too early",
        &[(
            "fly.rs",
            "let at = (stored.start() - start) as usize;",
            "let at = ((stored.start() - start) as usize).saturating_sub(usize::from(BUG));",
        )],
    ),
    mapped_file(
        "AcceptOtherIdentity",
        "a mapped file is read although it is another one now",
        &[("area/file.rs", "        if then != now {", "        if then != now && !BUG {")],
    ),
    mapped_file(
        "SkipFirstSeen",
        "the first bytes read of a mapped file are not compared with later ones",
        &[("seen.rs", "if *entry != right {", "if *entry != right && !BUG {")],
    ),
    mapped_file(
        "KeepFirstChecksumOnly",
        "of a mapped file's chunk only the first block's checksum is kept",
        &[(
            "seen.rs",
            "            } else {
                entry.copy_from_slice(&right);",
            "            } else if !new || !BUG {
                entry.copy_from_slice(&right);",
        )],
    ),
];
