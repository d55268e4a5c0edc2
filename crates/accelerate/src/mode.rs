//! The modes of a device.

/// Treatment of writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// To the slow device; the cache forgets the blocks.
    WriteAround,
    /// To the slow device, and then to the cache.
    WriteThrough,
    /// To the log of the cache device, and later to the slow device.
    WriteBack,
}

impl Mode {
    /// All of them, with their names.
    pub const ALL: [(Self, &str); 3] = [
        (Self::WriteAround, "write-around"),
        (Self::WriteThrough, "write-through"),
        (Self::WriteBack, "write-back"),
    ];

    /// The mode of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == name).map(|(mode, _)| *mode)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(mode, _)| *mode == self).map_or("?", |(_, name)| name)
    }
}
