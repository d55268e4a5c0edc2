//! The bugs that the simulator must find: texts of `crates/accelerate/src` and their replacements.
//!
//! Each text occurs exactly once in its file, or `build.rs` says which one does not. [`SWITCH`]
//! stands for the question whether the bug is on; while it is off, the copy must behave as the
//! original does.

/// The text that a replacement has in place of "this bug is on".
pub const SWITCH: &str = "BUG";

/// A defect, and how to make it.
pub struct Bug {
    /// The name that turns it on.
    pub name: &'static str,
    /// Description of the defect.
    pub says: &'static str,
    /// File, text, replacement.
    pub patches: &'static [(&'static str, &'static str, &'static str)],
}

const fn bug(
    name: &'static str,
    says: &'static str,
    patches: &'static [(&'static str, &'static str, &'static str)],
) -> Bug {
    Bug { name, says, patches }
}

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
            "        self.change(at, len, |_| self.slow.erase(range, how), |_, _| ())?;",
            "        if BUG { return self.slow.erase(range, how); }
            self.change(at, len, |_| self.slow.erase(range, how), |_, _| ())?;",
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
        &[("device.rs", "        if !idle.is_empty() {", "        if !idle.is_empty() && !BUG {")],
    ),
    bug(
        "ClearBeforeIndex",
        "marks are cleared before the index is stored",
        &[(
            "device.rs",
            "        let stored = self.store.store_index(&self.counts).and_then(|()| {",
            "        if BUG { drop(self.marks.clear(&idle, &self.bitmaps())); }
            let stored = self.store.store_index(&self.counts).and_then(|()| {",
        )],
    ),
    bug(
        "ClearWithoutIndexSync",
        "marks are cleared although the cache device may still lose the index",
        &[(
            "store.rs",
            "                counts.add(Count::CacheMetaBytes, BLOCK_SIZE);\n            }\n        }\n        self.file.sync()",
            "                counts.add(Count::CacheMetaBytes, BLOCK_SIZE);\n            }\n        }
            if BUG { return Ok(()); }
            self.file.sync()",
        )],
    ),
    bug(
        "TrustMarked",
        "after an unclean stop, blocks of marked regions are kept",
        &[(
            "device.rs",
            "|key| is_its(key) && is_marked(key));",
            "|key| is_its(key) && is_marked(key) && !BUG);",
        )],
    ),
    bug(
        "WarmWhenCold",
        "a cold start keeps the content, although another program may have written",
        &[
            ("store.rs", "        if trust == Trust::Cold {", "        let trust = if BUG { Trust::Warm } else { trust };
        if trust == Trust::Cold {"),
            (
                "device.rs",
                "        let dropped = store.drop_blocks(is_its);",
                "        let dropped = store.drop_blocks(|key| is_its(key) && !BUG);",
            ),
        ],
    ),
    bug(
        "ColdOnlyInMemory",
        "a cold start is not recorded, and the next warm one finds the old index",
        &[("store.rs", "            head.epoch += 1;", "            head.epoch += u64::from(!BUG);")],
    ),
    bug(
        "ForgetDistrust",
        "the failure of the cache device is not recorded",
        &[(
            "store.rs",
            "            (self.distrust)()?;",
            "            if !BUG { (self.distrust)()?; }",
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
            "        room.memory.remove(&key);\n        room.policy.forget(key);",
            "        if !BUG { room.memory.remove(&key); room.policy.forget(key); }",
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
            "device.rs",
            "            self.counts.note_lost();",
            "            if !BUG { self.counts.note_lost(); }",
        )],
    ),
    bug(
        "LossEndsWithItsProcess",
        "the next server does not learn that a flush has failed",
        &[("device.rs", "        self.counts = shared;", "        if !BUG { self.counts = shared; }")],
    ),
    bug(
        "FailWithTheCache",
        "a device in use is not served when the cache device fails at the start",
        &[(
            "device.rs",
            "            Err(error) if options.is_in_use => {",
            "            Err(error) if options.is_in_use && !BUG => {",
        )],
    ),
    bug(
        "FlushNothing",
        "a flush does not reach the slow device",
        &[(
            "device.rs",
            "        self.slow.sync().inspect_err(|error| {",
            "        if BUG { return Ok(()); }
            self.slow.sync().inspect_err(|error| {",
        )],
    ),
    bug(
        "FuaIsNoFlush",
        "a write with FUA is volatile",
        &[("device.rs", "        if fua { self.flush() } else { Ok(()) }", "        if fua && !BUG { self.flush() } else { Ok(()) }")],
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
];
