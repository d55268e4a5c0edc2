//! The slow devices that a cache knows: their records in the superblock, and their bitmaps.

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, LocalFile, Result};

use crate::{
    format::{Block, DEVICES_MAX, DeviceRecord, NAME_MAX, REGION, REGIONS_A_BLOCK, Super},
    layout::Layout,
    marks::{Bitmaps, Marks},
    store::{CacheStore, write_new},
};

/// Makes a cache on `file` for the slow devices of a former one: their counters go on, and nothing
/// is cached. `Invalid` if it is too small for one of them.
pub fn create_for(
    file: &impl LocalFile,
    layout: Layout,
    id: [u8; 16],
    former: Option<&Super>,
) -> Result<()> {
    let mut head = Super::new(id, layout);
    let mut bitmap_first = 0;
    let records = former.map_or(&[][..], |former| &former.devices[..]);
    for (record, known) in head.devices.iter_mut().zip(records) {
        if known.used.get() == 0 {
            continue;
        }
        let (name, size, blocks) = (known.name(), known.size.get(), known.bitmap_blocks.get());
        let fits = size.div_ceil(BLOCK_SIZE) <= layout.blocks_max();
        if !fits || bitmap_first + blocks > layout.bitmap_blocks {
            let what = format!(
                "a cache of {} bytes is too small for the slow device {name} of {size} bytes",
                layout.size
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        *record = *known;
        record.bitmap_first = bitmap_first.into();
        // The new log begins anew.
        record.tail = 0.into();
        bitmap_first += blocks;
    }
    write_new(file, &head)
}

impl<C: LocalFile> CacheStore<C> {
    /// The number and record of the slow device `name`.
    pub(crate) fn record(&self, name: &str) -> Option<(u8, DeviceRecord)> {
        let head = self.head();
        let mut records = head.devices.iter().enumerate();
        let is_it = |record: &DeviceRecord| record.used.get() != 0 && record.name() == name;
        records.find(|(_, record)| is_it(record)).map(|(number, record)| (number as u8, *record))
    }

    /// Names and sizes of the slow devices that the cache knows.
    pub fn known(&self) -> Vec<(String, u64)> {
        let head = self.head();
        let used = head.devices.iter().filter(|record| record.used.get() != 0);
        used.map(|record| (record.name(), record.size.get())).collect()
    }

    /// A record for a new slow device. `NoSpace` if there is no room for one.
    pub(crate) fn add_record(&self, name: &str, size: u64) -> Result<(u8, DeviceRecord)> {
        let full = |what: String| Error::new(ErrorKind::NoSpace, what);
        if name.is_empty() || name.len() > NAME_MAX {
            let what = format!("a device's name has 1 to {NAME_MAX} bytes: {name:?} has not");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if size.div_ceil(BLOCK_SIZE) > self.layout.blocks_max() {
            let max = self.layout.blocks_max() * BLOCK_SIZE;
            let what = format!(
                "a slow device of {size} bytes is too large for this cache: {max} are the most"
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let blocks = size.div_ceil(REGION).div_ceil(u64::from(REGIONS_A_BLOCK)).max(1);
        let Some(first) = self.free_bitmap(blocks) else {
            return Err(full(format!(
                "the cache has no room for the bitmap of {name}: make a larger one (`burgeon \
                 accelerate destroy`, `create`)"
            )));
        };
        let mut record = DeviceRecord::empty();
        record.used = 1.into();
        record.bitmap_first = first.into();
        record.bitmap_blocks = (blocks as u32).into();
        record.size = size.into();
        // A device of the same number may have left blocks there.
        record.tail = self.log_position().into();
        record.name[..name.len()].copy_from_slice(name.as_bytes());
        let free = self.head().devices.iter().position(|record| record.used.get() == 0);
        let Some(number) = free else {
            return Err(full(format!(
                "the cache knows {DEVICES_MAX} slow devices, which are the most: make it anew \
                 (`burgeon accelerate destroy`, `create`), or another one"
            )));
        };
        Ok((number as u8, record))
    }

    /// The first of `blocks` free blocks of the bitmaps.
    fn free_bitmap(&self, blocks: u64) -> Option<u32> {
        let head = self.head();
        let mut used: Vec<(u32, u32)> = head
            .devices
            .iter()
            .filter(|r| r.used.get() != 0)
            .map(|r| (r.bitmap_first.get(), r.bitmap_blocks.get()))
            .collect();
        used.sort_unstable();
        let mut first = 0;
        for (start, len) in used {
            if u64::from(start) >= u64::from(first) + blocks {
                return Some(first);
            }
            first = first.max(start + len);
        }
        (u64::from(first) + blocks <= u64::from(self.layout.bitmap_blocks)).then_some(first)
    }

    /// Stores a record.
    pub(crate) fn put_record(&self, number: u8, record: DeviceRecord) -> Result<()> {
        self.store_head_of(Some(number), |head| head.devices[usize::from(number)] = record)
    }

    /// Changes a record.
    pub(crate) fn change_record(
        &self,
        number: u8,
        change: impl FnOnce(&mut DeviceRecord),
    ) -> Result<()> {
        self.store_head_of(Some(number), |head| change(&mut head.devices[usize::from(number)]))
    }

    /// Forgets the slow device `name`.
    pub fn forget_device(&self, name: &str) -> Result<()> {
        match self.record(name) {
            Some((number, _)) if self.log.as_ref().is_some_and(|l| l.count(Some(number)) > 0) => {
                let what =
                    format!("the cache has dirty blocks of {name}: attach it, and detach it");
                Err(Error::new(ErrorKind::Unavailable, what))
            }
            Some((number, _)) => {
                self.drop_blocks(|key| key.device == number);
                self.store_index()?;
                self.put_record(number, DeviceRecord::empty())
            }
            None => {
                let what = format!("the cache knows no slow device {name}");
                Err(Error::new(ErrorKind::NotFound, what))
            }
        }
    }

    /// Numbers and names of the slow devices that the cache knows.
    pub(crate) fn known_numbers(&self) -> Vec<(u8, String)> {
        let head = self.head();
        let records = head.devices.iter().enumerate().filter(|(_, record)| record.used.get() != 0);
        records.map(|(number, record)| (number as u8, record.name())).collect()
    }

    /// The bitmap of a known device.
    pub(crate) fn load_marks(&self, record: &DeviceRecord) -> Marks {
        let (first, blocks) = (record.bitmap_first.get(), record.bitmap_blocks.get());
        let regions = record.size.get().div_ceil(REGION) as u32;
        let read = |block: u32, stored: &mut Block| {
            self.file.read_at(self.layout.bitmap_at(first + block), &mut stored.0)
        };
        Marks::load(self.id(), first, blocks, regions, read)
    }
}

/// The bitmap blocks of one slow device.
pub(crate) struct DeviceBitmaps<'a, C> {
    pub(crate) store: &'a CacheStore<C>,
    pub(crate) number: u8,
    pub(crate) first: u32,
}

impl<C: LocalFile> Bitmaps for DeviceBitmaps<'_, C> {
    fn write(&self, block: u32, bytes: &Block) -> Result<()> {
        self.store.overhead.note(Some(self.number), BLOCK_SIZE);
        self.store.file.write_at(self.store.layout.bitmap_at(self.first + block), &bytes.0)
    }

    fn sync(&self) -> Result<()> {
        self.store.sync()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use burgeon_block::{LocalFile, Result};

    use super::create_for;
    use crate::{
        format::{DeviceRecord, Layout, Super},
        store::read_super,
    };

    struct Memory(Mutex<Vec<u8>>);

    impl LocalFile for Memory {
        fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
            buf.copy_from_slice(&self.0.lock().unwrap()[offset as usize..][..buf.len()]);
            Ok(())
        }

        fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
            self.0.lock().unwrap()[offset as usize..][..buf.len()].copy_from_slice(buf);
            Ok(())
        }

        fn sync(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_new_cache_device_knows_the_slow_devices_of_the_former_one() {
        let layout = Layout::new(1 << 30).unwrap();
        let mut former = Super::new([1; 16], layout);
        // Apart from each other, as they are once others were forgotten.
        for (number, first, blocks) in [(3, 9, 2), (5, 20, 20)] {
            let mut record = DeviceRecord::empty();
            record.used = 1.into();
            (record.bitmap_first, record.bitmap_blocks) = (first.into(), u32::into(blocks));
            (record.size, record.tail) = ((40_000 << 20).into(), 77.into());
            record.name[0] = b'a' + number as u8;
            record.counters[2] = 1234.into();
            former.devices[number] = record;
        }
        let small = Layout::new(2 << 20).unwrap();
        let memory = Memory(Mutex::new(vec![7; 2 << 20]));
        create_for(&memory, small, [2; 16], Some(&former)).unwrap();
        let read = read_super(&memory, 2 << 20).unwrap();
        let used: Vec<_> = (0..16).filter(|at| read.devices[*at].used.get() != 0).collect();
        assert_eq!((used, read.id, read.layout), (vec![3, 5], [2; 16], small));
        let place = |at: usize| (read.devices[at].bitmap_first.get(), read.devices[at].tail.get());
        assert_eq!([place(3), place(5)], [(0, 0), (2, 0)]);
        assert!([3, 5].iter().all(|at| read.devices[*at].counters[2].get() == 1234));
        former.devices[5].bitmap_blocks = 31.into();
        let error = create_for(&memory, small, [3; 16], Some(&former)).unwrap_err();
        assert!(error.to_string().contains("the slow device f of"), "{error}");
        assert_eq!(read_super(&memory, 2 << 20).unwrap().id, [2; 16]);
        former.devices[5].size = (1 << 60).into();
        assert!(create_for(&memory, layout, [3; 16], Some(&former)).is_err());
    }
}
