//! The bugs that the simulator must find: texts of `crates/accelerate/src` and their replacements.
//!
//! Each text occurs exactly once in its file, or `build.rs` says which one does not. [`SWITCH`]
//! stands for the question whether the bug is on; while it is off, the copy must behave as the
//! original does.

#[path = "bug.rs"]
mod bug;

use bug::bug;
pub use bug::{Bug, SWITCH};

/// All of them.
pub const BUGS: &[Bug] = &[
    bug(
        "KeepOnWriteAround",
        "a write round the cache leaves the former version in it",
        &[(
            "device.rs",
            "        let slots = (first..end).map(|block| self.store.forget(self.key(block))).collect();",
            "        let forgets = !(BUG && self.mode() == Mode::WriteAround);
            let forget = |block| self.store.forget(self.key(block)).filter(|_| forgets);
            let slots = (first..end).filter(|_| forgets).map(forget).collect();",
        )],
    ),
    bug(
        "KeepOnErase",
        "erased blocks stay in the cache",
        &[(
            "device.rs",
            "        self.change((at, len, locked), |_| self.slow.erase(range, how), |_, _| ())?;",
            "        if BUG { return self.slow.erase(range, how); }
            self.change((at, len, locked), |_| self.slow.erase(range, how), |_, _| ())?;",
        )],
    ),
    bug(
        "CacheFailedWrite",
        "a write that the slow device refused goes into the cache",
        &[(
            "device.rs",
            "            Err(error) => self.note_slow_error(error),\n        }\n        drop(slots);",
            "            Err(_) if BUG => after(&mut slots.slots, &edges),
            Err(error) => self.note_slow_error(error),\n        }\n        drop(slots);",
        )],
    ),
    bug(
        "SkipMark",
        "the slow device is written without a mark",
        &[(
            "device.rs",
            "        match self.marks.begin(regions, &self.bitmaps()) {",
            "        if BUG { return Ok(true); }
            match self.marks.begin(regions, &self.bitmaps()) {",
        )],
    ),
    bug(
        "MarkWithoutSync",
        "a mark is not durable when the slow device is written",
        &[("marks.rs", "        if durably {", "        if durably && !BUG {")],
    ),
    bug(
        "ClearWithoutSlowSync",
        "marks are cleared although the slow device may still lose the writes",
        &[("upkeep.rs", "        if !idle.is_empty() {", "        if !idle.is_empty() && !BUG {")],
    ),
    bug(
        "ClearBeforeIndex",
        "marks are cleared before the index is stored",
        &[(
            "upkeep.rs",
            "        let stored = self.refresh_identity(&idle);",
            "        if BUG { drop(self.marks.clear(&idle, &self.bitmaps())); }
            let stored = self.refresh_identity(&idle);",
        )],
    ),
    bug(
        "ClearWithoutIndexSync",
        "marks are cleared although the cache device may still lose the index",
        &[(
            "store.rs",
            "                self.note_overhead(BLOCK_SIZE);\n            }\n        }\n        self.sync()",
            "                self.note_overhead(BLOCK_SIZE);\n            }\n        }
            if BUG { return Ok(()); }
            self.sync()",
        )],
    ),
    bug(
        "TrustMarked",
        "after an unclean stop, blocks of marked regions are kept",
        &[(
            "attach.rs",
            "|key| is_its(key) && is_marked(key));",
            "|key| is_its(key) && is_marked(key) && !BUG);",
        )],
    ),
    bug(
        "WarmWhenCold",
        "a cold start keeps the content, although another program may have written",
        &[
            (
                "store.rs",
                "        if trust == Trust::Cold {",
                "        let trust = if BUG { Trust::Warm } else { trust };
        if trust == Trust::Cold {",
            ),
            (
                "attach.rs",
                "        let dropped = store.drop_blocks(is_its);",
                "        let dropped = store.drop_blocks(|key| is_its(key) && !BUG);",
            ),
        ],
    ),
    bug(
        "ColdOnlyInMemory",
        "a cold start is not recorded, and the next warm one finds the old index",
        &[(
            "store.rs",
            "            head.epoch += 1;",
            "            head.epoch += u64::from(!BUG);",
        )],
    ),
    bug(
        "ForgetDistrust",
        "the failure of the cache device is not recorded",
        &[(
            "store.rs",
            "            (self.distrust)(&dirty)?;",
            "            if !BUG { (self.distrust)(&dirty)?; }",
        )],
    ),
    bug(
        "GoRoundSilently",
        "a write that cannot be marked is made, and the cache goes on",
        &[(
            "device.rs",
            "                self.store.give_up(&error)?;\n                Ok(false)",
            "                if !BUG { self.store.give_up(&error)?; }\n                Ok(false)",
        )],
    ),
    bug(
        "SkipCheck",
        "cached blocks are served without their check",
        &[(
            "store.rs",
            "            Ok(()) if self.sets.check(slot) == check_of(key, bytes) => {",
            "            Ok(()) if BUG || self.sets.check(slot) == check_of(key, bytes) => {",
        )],
    ),
    bug(
        "MemoryOutlivesWrite",
        "a write leaves the former version in memory",
        &[(
            "store.rs",
            "        residents.memory.remove(&key);\n        residents.policy.forget(key);",
            "        if !BUG { residents.memory.remove(&key); residents.policy.forget(key); }",
        )],
    ),
    bug(
        "MergeNothing",
        "a partial write puts zeros round itself into the cache",
        &[(
            "device.rs",
            "                page.bytes_mut().copy_from_slice(edge.bytes());",
            "                if !BUG { page.bytes_mut().copy_from_slice(edge.bytes()); }",
        )],
    ),
    bug(
        "FlushAfterFailure",
        "a flush succeeds after one has failed",
        &[(
            "backing.rs",
            "        self.counts.note_lost();",
            "        if !BUG { self.counts.note_lost(); }",
        )],
    ),
    bug(
        "LossEndsWithItsProcess",
        "the next server does not learn that a flush has failed",
        &[(
            "attach.rs",
            "        self.counts = shared;",
            "        if !BUG { self.counts = shared; }",
        )],
    ),
    bug(
        "FailWithTheCache",
        "a device in use is not served when the cache device fails at the start",
        &[(
            "attach.rs",
            "            Err(error) if options.is_in_use => {",
            "            Err(error) if options.is_in_use && !BUG => {",
        )],
    ),
    bug(
        "FlushNothing",
        "a flush does not reach the slow device",
        &[(
            "backing.rs",
            "        self.check()?;\n        self.pending.returned.store(false, SeqCst);",
            "        self.check()?;\n        if BUG { return Ok(()); }\n        self.pending.returned.store(false, SeqCst);",
        )],
    ),
    bug(
        "FuaIsNoFlush",
        "a write with FUA is volatile",
        &[(
            "device.rs",
            "        if fua { self.flush() } else { Ok(()) }",
            "        if fua && !BUG { self.flush() } else { Ok(()) }",
        )],
    ),
    bug(
        "WrongSlotOfDevice",
        "the two devices share their keys",
        &[(
            "device.rs",
            "        Key { device: self.number, block }",
            "        Key { device: if BUG { 0 } else { self.number }, block }",
        )],
    ),
    bug(
        "CacheTheTail",
        "the incomplete block at the end is cached",
        &[(
            "device.rs",
            "        self.slow.size() / BLOCK_SIZE\n",
            "        if BUG { self.slow.size().div_ceil(BLOCK_SIZE) } else { self.slow.size() / BLOCK_SIZE }\n",
        )],
    ),
    bug(
        "AckBeforeBarrier",
        "a flush returns before the log is durable",
        &[(
            "upkeep.rs",
            "        self.store.barrier()?;",
            "        if !BUG { self.store.barrier()?; }",
        )],
    ),
    bug(
        "ForgetLostBarrier",
        "a failed barrier fails the flush alone that came first",
        &[(
            "write_back.rs",
            "            self.backings().iter().flatten().for_each(|backing| backing.note_lost(error));",
            "            if !BUG { self.backings().iter().flatten().for_each(|backing| backing.note_lost(error)); }",
        )],
    ),
    bug(
        "RetireWithoutSlowSync",
        "the log is reused although the slow device may still lose the blocks",
        &[(
            "drain.rs",
            "            self.attached(*device)?.sync_logged()?;",
            "            if !BUG { self.attached(*device)?.sync_logged()?; }",
        )],
    ),
    bug(
        "ReuseWithoutTail",
        "the log is reused before the superblock says that it was retired",
        &[(
            "write_back.rs",
            "        let stored = self.store_head(|head| head.log.tail = head.log.tail.max(tail));",
            "        let stored = self.store_head(|head| if !BUG { head.log.tail = head.log.tail.max(tail) });",
        )],
    ),
    bug(
        "FreeUnwritten",
        "blocks leave the log that were not written back",
        &[(
            "write_back.rs",
            "        self.write_versions(log, &versions, throttle)?;",
            "        if !BUG { self.write_versions(log, &versions, throttle)?; }",
        )],
    ),
    bug(
        "LateWriteCounts",
        "a record counts that a dead process wrote after its successor began",
        &[(
            "store.rs",
            "                if head.log.open.is_some() {",
            "                if head.log.open.is_some() && !BUG {",
        )],
    ),
    bug(
        "FillTheSegmentOfTheDead",
        "the successor writes where a dead process may still write",
        &[(
            "recover.rs",
            "    let avoided = head.open.filter(|open| *open < count);",
            "    let avoided = head.open.filter(|open| *open < count && !BUG);",
        )],
    ),
    bug(
        "TornVersionCounts",
        "a version whose bytes are torn counts",
        &[(
            "recover.rs",
            "check_of(*key, bytes) == *check",
            "BUG || check_of(*key, bytes) == *check",
        )],
    ),
    bug(
        "OldestVersionCounts",
        "the oldest version in the log counts",
        &[(
            "recover.rs",
            "                map.insert(*key, DirtyVersion { number, place, check: *check });",
            "                let entry = DirtyVersion { number, place, check: *check };\n                if BUG { map.entry(*key).or_insert(entry); } else { map.insert(*key, entry); }",
        )],
    ),
    bug(
        "PassDirty",
        "a write that bypasses the log passes a dirty version",
        &[(
            "dirty.rs",
            "        Ok((wants && log.takes_more()) || self.meets_dirty(at, len))",
            "        Ok((wants && log.takes_more()) || (self.meets_dirty(at, len) && !BUG))",
        )],
    ),
    bug(
        "EraseUnderDirty",
        "an erasure passes a dirty version",
        &[(
            "dirty.rs",
            "            if !self.meets_dirty(at, len) {",
            "            if BUG || !self.meets_dirty(at, len) {",
        )],
    ),
    bug(
        "LogZerosAround",
        "a partial write puts zeros round itself into the log",
        &[(
            "dirty.rs",
            "        if !at.is_multiple_of(BLOCK_SIZE) {",
            "        if !at.is_multiple_of(BLOCK_SIZE) && !BUG {",
        )],
    ),
    bug(
        "KeepSlotOfDirty",
        "a block that becomes dirty stays in the sets",
        &[(
            "dirty.rs",
            "            let slot = self.store.forget(self.key(block));",
            "            let slot = if BUG { None } else { self.store.forget(self.key(block)) };",
        )],
    ),
    bug(
        "IndexOverLog",
        "after a start, the index has an older version of a dirty block",
        &[(
            "store.rs",
            "store.log.as_ref().is_some_and(|log| log.find(key).is_some()));",
            "!BUG && store.log.as_ref().is_some_and(|log| log.find(key).is_some()));",
        )],
    ),
    bug(
        "ReadUnderDirty",
        "a read passes a dirty version",
        &[(
            "device.rs",
            "                let tier = match self.store.get_dirty(key, part, &self.counts)? {",
            "                let tier = match !BUG && self.store.get_dirty(key, part, &self.counts)? {",
        )],
    ),
    bug(
        "DirtyWithoutCache",
        "without its cache device, a device is served as if nothing were dirty",
        &[(
            "dirty.rs",
            "            Some(key) if self.store.has_failed() => {",
            "            Some(key) if self.store.has_failed() && !BUG => {",
        )],
    ),
    bug(
        "SegmentsGrow",
        "a growth of the cache moves the segments of the log",
        &[(
            "layout.rs",
            "        (self.extents[0].log_blocks / 16).clamp(4, 4096)",
            "        ((if BUG { self.log_blocks } else { self.extents[0].log_blocks }) / 16).clamp(4, 4096)",
        )],
    ),
    bug(
        "TailOfDeviceTooFar",
        "the tail of a device passes blocks that are dirty yet",
        &[(
            "log.rs",
            "            tail = last + 1;",
            "            tail = if BUG { before } else { last + 1 };",
        )],
    ),
    bug(
        "TailOfDeviceForgotten",
        "a start finds blocks dirty that were written back for their device alone",
        &[(
            "recover.rs",
            "is_some_and(|tail| number < *tail) {",
            "is_some_and(|tail| number < *tail && !BUG) {",
        )],
    ),
    bug(
        "SamplesOfBlocksThatAreWrittenBack",
        "the identity has the former content of a block that is being written back",
        &[(
            "identity.rs",
            "            state.changed |= state.samples.remove(&block).is_some();",
            "            if !BUG { state.changed |= state.samples.remove(&block).is_some(); }",
        )],
    ),
    bug(
        "MarksGoBeforeIdentity",
        "a region loses its mark, and the identity has its former content",
        &[(
            "upkeep.rs",
            "        let cleared = |region: u32| idle.binary_search_by_key(&region, Idle::region).is_ok();",
            "        if BUG { return Ok(()); }
            let cleared = |region: u32| idle.binary_search_by_key(&region, Idle::region).is_ok();",
        )],
    ),
    bug(
        "IdentityIsVolatile",
        "the tail of the log passes blocks whose identity a power failure takes back",
        &[("identity.rs", "        if !state.changed {", "        if BUG || !state.changed {")],
    ),
];
