//! The bugs that the simulator must find: texts of `crates/volume/src` and their replacements.
//!
//! Each text occurs exactly once in its file, or `build.rs` says which one does not. [`SWITCH`]
//! stands for the question whether the bug is on; while it is off, the copy must behave as the
//! original does.

/// The text that a replacement has in place of "this bug is on".
pub const SWITCH: &str = "BUG";

/// A subject of bugs, which has a simulation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Of {
    /// One volume over a cache.
    Image,
    /// Mapped files.
    MappedFile,
    /// Several volumes over one cache.
    SharedCache,
}

/// A defect, and how to make it.
pub struct Bug {
    /// The name that turns it on.
    pub name: &'static str,
    /// Description of the defect.
    pub says: &'static str,
    /// The simulation that must find it.
    pub of: Of,
    /// File, text, replacement.
    pub patches: &'static [(&'static str, &'static str, &'static str)],
}

const fn image(
    name: &'static str,
    says: &'static str,
    patches: &'static [(&'static str, &'static str, &'static str)],
) -> Bug {
    Bug { name, says, of: Of::Image, patches }
}

const fn mapped_file(
    name: &'static str,
    says: &'static str,
    patches: &'static [(&'static str, &'static str, &'static str)],
) -> Bug {
    Bug { name, says, of: Of::MappedFile, patches }
}

const fn shared_cache(
    name: &'static str,
    says: &'static str,
    patches: &'static [(&'static str, &'static str, &'static str)],
) -> Bug {
    Bug { name, says, of: Of::SharedCache, patches }
}

/// All of them.
pub const BUGS: &[Bug] = &[
    image(
        "SkipCachedChecksum",
        "resident blocks are served without their checksum being looked at",
        &[(
            "verify.rs",
            "        let mut good = true;",
            "        if BUG { return Ok(true); }
            let mut good = true;",
        )],
    ),
    image(
        "CheckFirstBlockOnly",
        "only the first block of a resident read is checked",
        &[(
            "verify.rs",
            "Self::OfMap { map, start } => compare(map, start + offset, bytes, |address| {",
            "Self::OfMap { map, start } => compare(map, start + offset, {
                if BUG { &bytes[..BLOCK_SIZE as usize] } else { bytes }
            }, |address| {",
        )],
    ),
    image(
        "TrustLoadedChunks",
        "chunks that an earlier server has left in the cache are believed",
        &[
            (
                "residency/mod.rs",
                "    places: Places,\n    /// The domains",
                "    places: Places,
                pub(crate) admitted: std::sync::Mutex<std::collections::HashSet<u32>>,
                /// The domains",
            ),
            (
                "residency/mod.rs",
                "Self { cache, places: Places::new(keys.count()), keys, domains }",
                "Self {
                    cache, places: Places::new(keys.count()), keys, domains,
                    admitted: Default::default(),
                }",
            ),
            (
                "residency/mod.rs",
                "        if place.is_some() {",
                "        if place.is_some() {
                self.admitted.lock().unwrap().insert(index);",
            ),
            (
                "volume.rs",
                "Here::Read => self.is_good(piece, out),",
                "Here::Read => {
                    BUG && !self.residency.admitted.lock().unwrap().contains(&index)
                        || self.is_good(piece, out)
                }",
            ),
            (
                "volume.rs",
                "        self.residency.read(index, offset as u32, buf) && self.is_good(piece, buf)",
                "        let is_believed = BUG
                    && !self.residency.admitted.lock().unwrap().contains(&index);
                self.residency.read(index, offset as u32, buf)
                    && (is_believed || self.is_good(piece, buf))",
            ),
        ],
    ),
    image(
        "KeepBadChunk",
        "a chunk with a wrong digest stays in the cache",
        &[(
            "residency/mod.rs",
            "self.cache.store.doubt(*place, key);",
            "if !BUG { self.cache.store.doubt(*place, key); }",
        )],
    ),
    image(
        "DoubtByTheMapAlone",
        "the cache forgets a chunk because of an image's checksums, though its digest is right",
        &[(
            "fetch/cached.rs",
            "        if !is_right {",
            "        let slandered = check_blocks(&self.map, chunk.range.start(), bytes).is_err();
            if !is_right || BUG && slandered {",
        )],
    ),
    image(
        "FetchWhatIsRight",
        "a chunk of the cache whose digest is right is fetched all the same",
        &[("fetch/chunk.rs", "if may_be_cached && let", "if may_be_cached && !BUG && let")],
    ),
    image(
        "SkipSeal",
        "a chunk without a digest is taken from the cache although its seal does not fit",
        &[(
            "fetch/cached.rs",
            "Codec::Verified => has_seal,",
            "Codec::Verified => has_seal || BUG,",
        )],
    ),
    image(
        "NoSeal",
        "chunks without a digest are kept without a seal: no other image can use them",
        &[(
            "residency/seal.rs",
            "    let seal = of(key, bytes);",
            "    if BUG { return Some(pages); }
            let seal = of(key, bytes);",
        )],
    ),
    image(
        "KeyByIndex",
        "chunks are kept under their number in the image instead of their digest",
        &[(
            "keys.rs",
            "        Some(ChunkKey::new(domain, kind, &identity))",
            "        let number = index.to_le_bytes();
            let identity = if BUG { &number[..] } else { &identity[..] };
            Some(ChunkKey::new(domain, kind, identity))",
        )],
    ),
    image(
        "KeyOfWholeObject",
        "chunks of a derived object are kept under the object's name alone",
        &[(
            "keys.rs",
            "identity[Digest::LEN..].copy_from_slice(parts.as_flattened());",
            "if !BUG { identity[Digest::LEN..].copy_from_slice(parts.as_flattened()); }",
        )],
    ),
    image(
        "AdmitUnverified",
        "fetched chunks are kept before their digest is looked at",
        &[(
            "fetch/chunk.rs",
            "        let unpacked = self.volume.cpu.run(move",
            "        if BUG {
                let mut pages = Pages::zeroed(chunk.range.len()).unwrap();
                let _ = decode_chunk(chunk.codec, &stored, pages.bytes_mut(), &chunk.digest);
                self.volume.residency.admit(index, pages.bytes(), Why::Read);
            }
            let unpacked = self.volume.cpu.run(move",
        )],
    ),
    image(
        "SkipDigest",
        "fetched chunks are not checked at all",
        &[(
            "fetch/chunk.rs",
            "    decode_chunk(chunk.codec, stored, out, &chunk.digest).map_err(",
            "    let decoded = decode_chunk(chunk.codec, stored, out, &chunk.digest);
            if BUG { return Ok(Unpacked { pages, is_map_right: true }); }
            decoded.map_err(",
        )],
    ),
    image(
        "ServeAfterDigestMismatch",
        "a chunk whose digest is wrong twice is served",
        &[
            ("fetch/chunk.rs", "    chunk: Chunk,\n}", "    chunk: Chunk, answers: u32,\n}"),
            (
                "fetch/chunk.rs",
                "chunk: volume.map.chunk(index) }",
                "chunk: volume.map.chunk(index), answers: 0 }",
            ),
            (
                "fetch/chunk.rs",
                "        let unpacked = self.volume.cpu.run(",
                "        self.answers += 1;
                if BUG && self.answers > 1 {
                    let mut pages = Pages::zeroed(chunk.range.len()).unwrap();
                    let _ = decode_chunk(chunk.codec, &stored, pages.bytes_mut(), &chunk.digest);
                    return Ok(pages);
                }
                let unpacked = self.volume.cpu.run(",
            ),
        ],
    ),
    image(
        "NoRefetch",
        "a wrong answer is not asked for again",
        &[(
            "fetch/retry.rs",
            "refetches: limits.refetches,",
            "refetches: if BUG { 0 } else { limits.refetches },",
        )],
    ),
    image(
        "TwoFetches",
        "every reader fetches for itself",
        &[(
            "fetch/mod.rs",
            "if let Some(waiter) = table.join(key) {",
            "if let Some(waiter) = table.join(key).filter(|_| !BUG) {",
        )],
    ),
    image(
        "LostWaiter",
        "a failed fetch does not wake those who wait for it",
        &[(
            "fetch/chunk.rs",
            "        drop(of_a_reader);",
            "        drop(of_a_reader);
            if BUG && result.is_err() { return std::mem::forget(in_flight); }",
        )],
    ),
    image(
        "LeakPermit",
        "the bytes and the permit of a failed fetch are never given back",
        &[(
            "fetch/chunk.rs",
            "        let kept = good &&",
            "        if BUG && !good { std::mem::forget(Arc::clone(&fetched)); }
            let kept = good &&",
        )],
    ),
    image(
        "DroppedReaderEndsFetch",
        "the fetch ends when a reader that waits for it goes away",
        &[
            (
                "fetch/in_flight.rs",
                "#[derive(Clone)]\npub(crate) struct Waiter {",
                "#[derive(Clone)]
                struct EndsFetch(Arc<tokio::sync::Notify>);
                impl Drop for EndsFetch {
                    fn drop(&mut self) { self.0.notify_one(); }
                }
                #[derive(Clone)]
                pub(crate) struct Waiter { ends: EndsFetch,",
            ),
            (
                "fetch/in_flight.rs",
                "let waiter = Waiter { outcome, end };",
                "let gone = Arc::new(tokio::sync::Notify::new());
                let waiter = Waiter { outcome, end, ends: EndsFetch(gone.clone()) };",
            ),
            ("fetch/in_flight.rs", "publish, ended }, waiter)", "publish, ended, gone }, waiter)"),
            (
                "fetch/in_flight.rs",
                "    ended: watch::Sender<bool>,\n}",
                "    ended: watch::Sender<bool>, pub(crate) gone: Arc<tokio::sync::Notify>,\n}",
            ),
            (
                "fetch/in_flight.rs",
                "let Self { outcome, mut end } = self;",
                "let Self { outcome, mut end, .. } = self;",
            ),
            (
                "fetch/chunk.rs",
                "            self.fetch_unless_cached(index, claim, deadline, &mut cost).await;\n        drop",
                "            tokio::select! {
                    biased;
                    () = in_flight.gone.notified(), if BUG => return,
                    result = self.fetch_unless_cached(index, claim, deadline, &mut cost) => result,
                };\n        drop",
            ),
        ],
    ),
    image(
        "NoTimeout",
        "a source is waited for without end",
        &[(
            "fetch/retry.rs",
            "let patience = self.limits.try_timeout.min(left);",
            "let patience = if BUG { Duration::MAX } else { self.limits.try_timeout.min(left) };",
        )],
    ),
    image(
        "CacheErrorFailsRead",
        "a failed cache write is the reader's error",
        &[(
            "fetch/chunk.rs",
            "        let good = result.is_ok();",
            "        let mut result = result;
            if BUG && let Ok(pages) = &result && !self.admit(index, pages.bytes(), why) {
                result = Err(Error::new(ErrorKind::LocalIo, \"the cache did not take it\"));
            }
            let good = result.is_ok();",
        )],
    ),
    image(
        "WriteAfterLocalIo",
        "cache writes go on after the file has failed",
        &[(
            "gate.rs",
            "            *state = State::Stopped { reason };
            return;",
            "            if !BUG { *state = State::Stopped { reason }; }
            return;",
        )],
    ),
    image(
        "NoSpaceForever",
        "cache writes never start again after the file system was full",
        &[(
            "gate.rs",
            "if error.kind() != ErrorKind::NoSpace {",
            "if error.kind() != ErrorKind::NoSpace || BUG {",
        )],
    ),
    image(
        "WriteOneBlockOff",
        "blocks are written to the cache one block too far",
        &[(
            "fetch/chunk.rs",
            "why.is_none_or(|why| self.residency.admit(index, bytes, why))",
            "why.is_none_or(|why| {
                let mut bytes = bytes.to_vec();
                bytes.rotate_right(if BUG { 4096 } else { 0 });
                self.residency.admit(index, &bytes, why)
            })",
        )],
    ),
    image(
        "SkipRunDigest",
        "chunks that came together in one answer are not checked",
        &[(
            "fetch/run.rs",
            "let result = match self.engine.verify(&mut request, stored, &mut cost).await {",
            "let verified = if BUG {
                let chunk = self.map.chunk(index);
                let mut pages = burgeon_block::Pages::zeroed(chunk.range.len()).unwrap();
                let out = pages.bytes_mut();
                let _ = burgeon_image::decode_chunk(chunk.codec, &stored, out, &chunk.digest);
                cost.fetches += 1;
                Ok(pages)
            } else {
                self.engine.verify(&mut request, stored, &mut cost).await
            };
            let result = match verified {",
        )],
    ),
    image(
        "LoseFailedRun",
        "the chunks of a run whose request failed are forgotten",
        &[(
            "fetch/run.rs",
            "return self.fetch_task(index, begun, Why::Prefetch, (claim, false)).await;",
            "if BUG { return std::mem::forget(begun); }
            return self.fetch_task(index, begun, Why::Prefetch, (claim, false)).await;",
        )],
    ),
    image(
        "CutRunOneByteOff",
        "the chunks of a run are cut out of the answer one byte too early",
        &[(
            "fetch/run.rs",
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
        &[("recorded.rs", "if *entry != right {", "if *entry != right && !BUG {")],
    ),
    mapped_file(
        "KeepFirstChecksumOnly",
        "of a mapped file's chunk only the first block's checksum is kept",
        &[(
            "recorded.rs",
            "            } else {
                entry.copy_from_slice(&right);",
            "            } else if !new || !BUG {
                entry.copy_from_slice(&right);",
        )],
    ),
    shared_cache(
        "FailWithTheOtherImage",
        "a chunk that another image could not fetch is not asked for from the own source",
        &[(
            "fetch/chunk.rs",
            "        (self.fetch(index, deadline, cost).await, false, turn)",
            "        if BUG && may_be_cached && turn.is_none() {
                let what = \"another image's fetch has failed\";
                return (Err(Error::new(ErrorKind::Unavailable, what)), false, turn);
            }
            (self.fetch(index, deadline, cost).await, false, turn)",
        )],
    ),
    shared_cache(
        "BlameTheMap",
        "an image is said to be damaged when the cache's bytes are wrong",
        &[(
            "fetch/cached.rs",
            "            let is_corrupt = self.residency.doubt(index, found)",
            "            if BUG { self.engine.outage.map_is_damaged(); }
            let is_corrupt = self.residency.doubt(index, found)",
        )],
    ),
    shared_cache(
        "ForgetBeforeHashing",
        "a chunk is forgotten because one image's checksums differ, before it is hashed",
        &[(
            "fetch/cached.rs",
            "        if let Some(turn) = self.engine.outage.hash_turn() {",
            "        if BUG { self.residency.doubt(index, &found); }
            if let Some(turn) = self.engine.outage.hash_turn() {",
        )],
    ),
];
