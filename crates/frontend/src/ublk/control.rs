//! Making, starting, stopping and removing devices: commands to `/dev/ublk-control`.
//!
//! Each is one io_uring command, waited for with a limit. They are given by the supervisor, which
//! outlives servers; the server itself only takes a device over ([`Control::begin_recovery`]), by a
//! [`Driver`](super::Driver).

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind, Result, Shape, WriteCache};
use io_uring::{IoUring, cqueue, opcode::UringCmd80, squeue, types};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::uapi::*;
use crate::{engine::LEN_MAX, sys::failed};

/// Requests in flight a queue, one of them never used (see [`spare_one_tag`]): room for one reader
/// of depth 64 on one CPU. Each costs 24 bytes of descriptor and an entry in the ring.
const QUEUE_DEPTH: u16 = 64;
/// The longest discard or write of zeros, in bytes.
const ERASE_MAX: u64 = 1 << 30;
/// Each queue is a thread with a buffer of 256 KiB; more do not make one reader faster.
const QUEUES_MAX: usize = 4;
/// Limit for a command. Starting a device reads its first blocks, perhaps from a source.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// Limit for device nodes to appear; devtmpfs makes them at once.
const NODE_TIMEOUT: Duration = Duration::from_secs(2);
/// Limit for a device to disappear after its deletion.
const DELETE_TIMEOUT: Duration = Duration::from_secs(10);

const NEEDED: u64 =
    FLAG_USER_RECOVERY | FLAG_USER_RECOVERY_REISSUE | FLAG_IOCTL_ENCODE | FLAG_USER_COPY;
const NO_QUEUE: u16 = u16::MAX;
const ANY_DEVICE: u32 = u32::MAX;
/// The most bytes that any command exchanges: a CPU mask of 1024 CPUs.
const PAYLOAD_LEN: usize = 128;

/// Queues of a device, and in-flight requests a queue. The default was measured best (`xtask bench
/// --only ublk-queues`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Queues {
    /// 1 or more; the kernel makes no more than there are CPUs.
    pub count: u16,
    /// 2 to 4096.
    pub depth: u16,
}

impl Default for Queues {
    fn default() -> Self {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        Self { count: cpus.clamp(1, QUEUES_MAX) as u16, depth: QUEUE_DEPTH }
    }
}

/// A device as the driver describes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UblkDevice {
    /// `N` of `/dev/ublkbN`.
    pub number: u32,
    /// The word that its maker gave to [`Control::add`].
    pub owner: u64,
    /// True if it was started and not stopped; true also while no server serves it.
    pub started: bool,
    /// True if its server has died and no other has taken it over yet.
    pub waits: bool,
    /// The process that opened it for its server, as the last [`Control::start`] or take-over named
    /// it.
    pub opener: Option<u32>,
    pub(super) queues: u16,
    pub(super) depth: u16,
}

/// The block device `number`.
pub fn block_path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{number}"))
}

pub(super) fn char_path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkc{number}"))
}

/// The numbers of all ublk devices of this kernel, other people's too.
pub fn numbers() -> Vec<u32> {
    let entries = fs::read_dir("/sys/class/ublk-char").into_iter().flatten().flatten();
    let numbers =
        entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok());
    let mut numbers: Vec<_> = numbers.collect();
    numbers.sort_unstable();
    numbers
}

/// Talks to the driver.
pub struct Control {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    path: CommandPath,
    commands: u64,
}

/// The path of a command to the driver.
enum CommandPath {
    /// By its file, with this process's credentials.
    File(File),
    /// By the ring's first file, with credentials that the ring has.
    Registered { personality: u16 },
}

/// Opens the driver. `UnsupportedFormat` for a kernel where that is dangerous.
pub(super) fn open_driver() -> Result<File> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    if crashes(&release) {
        return Err(Error::new(
            ErrorKind::UnsupportedFormat,
            format!("Linux {release} crashes when a ublk device is added: update the kernel"),
        ));
    }
    let opened = OpenOptions::new().read(true).write(true).open("/dev/ublk-control");
    opened.map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => failed(
            "the kernel's ublk driver is not loaded (no /dev/ublk-control): modprobe ublk_drv loads \
             it if the kernel has it",
            e,
        ),
        _ => failed("cannot open /dev/ublk-control", e),
    })
}

impl Control {
    /// Opens the driver, and checks that it has the needed features: `UnsupportedFormat` if not.
    pub fn open() -> Result<Self> {
        let file = open_driver()?;
        let ring = IoUring::builder().build(4).map_err(|e| failed("cannot make an io_uring", e))?;
        let mut control = Self { ring, path: CommandPath::File(file), commands: 0 };
        let lacks = |e| {
            Error::with_source(
                ErrorKind::UnsupportedFormat,
                "the kernel's ublk driver is too old: Linux 6.5 or later is needed",
                e,
            )
        };
        let mut features = [0u8; 8];
        control.call(GET_FEATURES, ANY_DEVICE, 0, &mut features).map_err(lacks)?;
        if u64::from_ne_bytes(features) & NEEDED != NEEDED {
            return Err(lacks(io::Error::from_raw_os_error(libc::EOPNOTSUPP)));
        }
        Ok(control)
    }

    /// Talks through `ring`, whose first file is the driver's.
    pub(super) fn through(
        ring: IoUring<squeue::Entry128, cqueue::Entry>,
        personality: u16,
    ) -> Self {
        Self { ring, path: CommandPath::Registered { personality }, commands: 0 }
    }

    /// Adds a device of this shape; `owner` is kept with it. It has to be served, then started.
    ///
    /// `NoSpace` if the kernel takes no more devices; `Invalid` if it makes none of this shape.
    pub fn add(&mut self, shape: &Shape, owner: u64, queues: Queues) -> Result<UblkDevice> {
        shape.check()?;
        let mut info = DeviceInfo {
            queues: queues.count,
            depth: queues.depth,
            max_io_len: LEN_MAX as u32,
            device: ANY_DEVICE,
            flags: NEEDED,
            owner,
            ..DeviceInfo::default()
        };
        self.call(ADD_DEV, ANY_DEVICE, 0, &mut info).map_err(cannot_add)?;
        let device = UblkDevice::from(&info);
        let mut params = params(shape);
        let set = match info.flags & NEEDED == NEEDED {
            true => self.call(SET_PARAMS, device.number, 0, &mut params).map(drop),
            false => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
        };
        let made = set
            .map_err(|e| failed("the kernel refuses a ublk device of this kind", e))
            .and_then(|()| await_node(&char_path(device.number)));
        match made {
            Ok(()) => Ok(device),
            Err(e) => {
                self.remove(device.number)?;
                Err(e)
            }
        }
    }

    /// Makes the block device appear. It must be served already; `opener` is the process that has
    /// opened it for that, which Linux 6.17 and later compare
    /// ([`UblkServer::opener`](super::UblkServer)).
    ///
    /// `Unavailable` if its server has died. One that dies at this moment goes unnoticed: Linux
    /// 6.12 then starts the device all the same, no other server can take it over, and its first
    /// reader waits for ever. So the caller hears from the server once more before it reads, or
    /// removes the device.
    pub fn start(&mut self, number: u32, opener: u32) -> Result<PathBuf> {
        let path = block_path(number);
        // A server keeps it open until some time after its death, and only one process can have it.
        if File::open(char_path(number)).is_ok() {
            let what = format!("cannot start {}: its server has died", path.display());
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        self.call(START_DEV, number, opener.into(), &mut [0u8; 0])
            .map_err(|e| failed(format!("cannot start {}", path.display()), e))?;
        let depth = self.device(number)?.map_or(QUEUE_DEPTH, |device| device.depth);
        spare_one_tag(number, depth)?;
        await_node(&path)?;
        Ok(path)
    }

    /// The driver's description of a device; `None` if there is none, or it is not root's.
    pub fn device(&mut self, number: u32) -> Result<Option<UblkDevice>> {
        let mut info = DeviceInfo::default();
        // Not GET_DEV_INFO2: that wants a path to compare, for the devices of users.
        match self.call(GET_DEV_INFO, number, 0, &mut info) {
            Ok(_) => Ok(Some(UblkDevice::from(&info))),
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENODEV | libc::EINVAL)) => Ok(None),
            Err(e) => Err(failed(format!("cannot ask for the ublk device {number}"), e)),
        }
    }

    /// Ends the block device: its server sees the end of its requests. No error if it was not
    /// started, or is gone.
    pub fn stop(&mut self, number: u32) -> Result<()> {
        match self.call(STOP_DEV, number, 0, &mut [0u8; 0]) {
            Err(e) if e.raw_os_error() != Some(libc::ENODEV) => {
                Err(failed(format!("cannot stop the ublk device {number}"), e))
            }
            _ => Ok(()),
        }
    }

    /// Stops a device and takes it away; waits until it is gone. No error if it was gone.
    pub fn remove(&mut self, number: u32) -> Result<()> {
        self.stop(number)?;
        let cannot = |e| failed(format!("cannot remove the ublk device {number}"), e);
        // The waiting kind of this command would wait for ever for a server that holds on.
        match self.call(DEL_DEV_ASYNC, number, 0, &mut [0u8; 0]) {
            Err(e) if e.raw_os_error() != Some(libc::ENODEV) => return Err(cannot(e)),
            _ => {}
        }
        let begun = Instant::now();
        while Path::new("/sys/class/ublk-char").join(format!("ublkc{number}")).exists() {
            if begun.elapsed() > DELETE_TIMEOUT {
                return Err(cannot(io::ErrorKind::TimedOut.into()));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Prepares a device whose server is dead for the next one; false as long as the kernel has not
    /// closed the files of the dead one.
    pub(super) fn begin_recovery(&mut self, number: u32) -> Result<bool> {
        match self.call(START_USER_RECOVERY, number, 0, &mut [0u8; 0]) {
            Ok(()) => Ok(true),
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Ok(false),
            // A server that took it over has died before its first queue was ready: the device is
            // prepared already.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => match self.device(number)? {
                Some(device) if device.waits => Ok(true),
                _ => Err(cannot_take_over(number, e)),
            },
            Err(e) => Err(cannot_take_over(number, e)),
        }
    }

    /// The new server serves all queues, and `opener` has opened the device: requests flow again.
    pub(super) fn end_recovery(&mut self, number: u32, opener: u32) -> Result<()> {
        self.call(END_USER_RECOVERY, number, opener.into(), &mut [0u8; 0])
            .map_err(|e| cannot_take_over(number, e))
    }

    /// The device's size in bytes.
    pub fn size(&mut self, number: u32) -> Result<u64> {
        let mut params =
            Params { len: size_of::<Params>() as u32, types: PARAM_BASIC, ..Params::default() };
        self.call(GET_PARAMS, number, 0, &mut params)
            .map_err(|e| failed(format!("cannot ask for the ublk device {number}"), e))?;
        Ok(params.sectors << SECTOR_SHIFT)
    }

    /// One command; `payload` goes there and comes back.
    fn call<T>(&mut self, op: u32, device: u32, data: u64, payload: &mut T) -> io::Result<()>
    where
        T: IntoBytes + FromBytes + Immutable,
    {
        let bytes = payload.as_mut_bytes();
        let len = bytes.len();
        assert!(len <= PAYLOAD_LEN, "the payload of a command has its bound");
        // Aligned for the kernel's structures, and on the heap: see below.
        let mut exchange = Box::new([0u64; PAYLOAD_LEN / 8]);
        exchange.as_mut_bytes()[..len].copy_from_slice(bytes);
        let command = ControlCommand {
            device,
            queue: NO_QUEUE,
            len: len as u16,
            address: if len == 0 { 0 } else { exchange.as_mut_ptr() as u64 },
            data,
            ..ControlCommand::default()
        };
        let done = self.wait_for(op, &command);
        if matches!(&done, Err(e) if e.kind() == io::ErrorKind::TimedOut) {
            // The kernel may still write there.
            Box::leak(exchange);
            return done;
        }
        bytes.copy_from_slice(&exchange.as_bytes()[..len]);
        done
    }

    fn wait_for(&mut self, op: u32, command: &ControlCommand) -> io::Result<()> {
        self.commands += 1;
        let mut inline = [0; 80];
        inline[..size_of::<ControlCommand>()].copy_from_slice(command.as_bytes());
        let entry = match &self.path {
            CommandPath::File(file) => {
                UringCmd80::new(types::Fd(file.as_raw_fd()), op).cmd(inline).build()
            }
            CommandPath::Registered { personality } => {
                UringCmd80::new(types::Fixed(0), op).cmd(inline).build().personality(*personality)
            }
        };
        let entry = entry.user_data(self.commands);
        // SAFETY: the command's memory lives until it is done, or for ever if it times out.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        let deadline = Instant::now() + COMMAND_TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timespec = types::Timespec::from(left);
            let arguments = types::SubmitArgs::new().timespec(&timespec);
            match self.ring.submitter().submit_with_args(1, &arguments) {
                Err(e) if matches!(e.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => {}
                Err(e) => return Err(e),
                Ok(_) => {}
            }
            for done in self.ring.completion() {
                // An earlier one that had timed out may end now.
                if done.user_data() == self.commands {
                    return match done.result() {
                        result if result < 0 => Err(io::Error::from_raw_os_error(-result)),
                        _ => Ok(()),
                    };
                }
            }
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

/// The driver's parameters of a device.
fn params(shape: &Shape) -> Params {
    let mut params = Params {
        len: size_of::<Params>() as u32,
        types: PARAM_BASIC,
        attributes: match shape.cache {
            WriteCache::ReadOnly => ATTRIBUTE_READ_ONLY,
            WriteCache::Through => 0,
            WriteCache::Volatile => ATTRIBUTE_VOLATILE_CACHE | ATTRIBUTE_FUA,
        },
        logical_block_shift: shape.logical_block.ilog2() as u8,
        physical_block_shift: shape.physical_block.ilog2() as u8,
        io_opt_shift: shape.optimal_io.ilog2() as u8,
        io_min_shift: shape.physical_block.ilog2() as u8,
        max_sectors: (LEN_MAX >> SECTOR_SHIFT) as u32,
        sectors: shape.size >> SECTOR_SHIFT,
        ..Params::default()
    };
    if shape.cache != WriteCache::ReadOnly && shape.discard_granularity > 0 {
        params.types |= PARAM_DISCARD;
        params.discard_granularity = shape.discard_granularity;
        // An erasure carries no bytes, so only the driver's arithmetic limits it.
        params.discard_max_sectors = (ERASE_MAX >> SECTOR_SHIFT) as u32;
        params.write_zeroes_max_sectors = (ERASE_MAX >> SECTOR_SHIFT) as u32;
        params.discard_max_segments = 1;
    }
    params
}

impl From<&DeviceInfo> for UblkDevice {
    fn from(info: &DeviceInfo) -> Self {
        Self {
            number: info.device,
            owner: info.owner,
            started: info.state != STATE_DEAD,
            waits: info.state == STATE_QUIESCED,
            // The driver has -1 before a device is started.
            opener: u32::try_from(info.server_pid).ok().filter(|pid| *pid > 0),
            queues: info.queues,
            depth: info.depth,
        }
    }
}

/// Kernels whose driver crashes when a device is added.
fn crashes(release: &str) -> bool {
    let is = |version: &str| {
        let rest = release.strip_prefix(version);
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    is("6.18.4") || is("6.18.5") || is("6.17") && release.contains("azure")
}

/// The parameter counts everybody's devices on older kernels; on 6.12 those of unprivileged users
/// alone (`crates/cli/tests/ublk.rs`), so that root never gets there.
fn cannot_add(cause: io::Error) -> Error {
    if cause.raw_os_error() != Some(libc::EACCES) {
        return failed("cannot add a ublk device", cause);
    }
    let most = fs::read_to_string("/sys/module/ublk_drv/parameters/ublks_max");
    Error::new(
        ErrorKind::NoSpace,
        format!(
            "all {} ublk devices that this kernel allows are in use: remove some, or raise \
             /sys/module/ublk_drv/parameters/ublks_max",
            most.as_deref().map_or("the", str::trim)
        ),
    )
}

pub(super) fn cannot_take_over(number: u32, cause: io::Error) -> Error {
    failed(format!("cannot take over ublk device {number}"), cause)
}

fn await_node(path: &Path) -> Result<()> {
    let begun = Instant::now();
    while !path.exists() {
        if begun.elapsed() > NODE_TIMEOUT {
            return Err(failed(
                format!("{} does not appear: is /dev a devtmpfs here?", path.display()),
                io::Error::from(io::ErrorKind::NotFound),
            ));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Keeps one tag of each queue out of use, so that its fetch command always waits in the kernel.
///
/// The driver (6.7 to 6.14) learns of a server's death by the cancelling of such commands. With
/// every request of a queue in the dead server's hands there would be none, and readers would
/// wait for ever (`tests/ublk_kill.rs`).
fn spare_one_tag(number: u32, depth: u16) -> Result<()> {
    let queue = PathBuf::from(format!("/sys/block/ublkb{number}/queue"));
    // With a scheduler the limit below would be the scheduler's, not the tags'.
    for (name, value) in [("scheduler", "none".into()), ("nr_requests", (depth - 1).to_string())] {
        let path = queue.join(name);
        fs::write(&path, value).map_err(|e| failed(format!("cannot set {}", path.display()), e))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use burgeon_block::{Shape, WriteCache};

    use super::{cannot_add, crashes, params};
    use crate::ublk::uapi::{ATTRIBUTE_FUA, ATTRIBUTE_READ_ONLY, ATTRIBUTE_VOLATILE_CACHE};

    #[test]
    fn the_driver_is_told_the_shape() {
        let shape = Shape::read_only(1 << 30);
        let told = params(&shape);
        assert_eq!((told.attributes, told.types), (ATTRIBUTE_READ_ONLY, 1));
        assert_eq!((told.logical_block_shift, told.sectors), (12, 1 << 21));
        let shape = Shape {
            logical_block: 512,
            optimal_io: 65_536,
            discard_granularity: 4096,
            cache: WriteCache::Volatile,
            ..shape
        };
        let told = params(&shape);
        assert_eq!(told.attributes, ATTRIBUTE_VOLATILE_CACHE | ATTRIBUTE_FUA);
        assert_eq!((told.types, told.discard_granularity), (3, 4096));
        assert_eq!((told.logical_block_shift, told.io_opt_shift), (9, 16));
    }

    #[test]
    fn known_bad_kernels_are_known_by_name() {
        for bad in ["6.18.4", "6.18.5-arch1-1", "6.18.4+deb14-amd64", "6.17.0-1008-azure"] {
            assert!(crashes(bad), "{bad}");
        }
        for good in ["6.18.44", "6.18.50-1", "6.18.6", "6.17.0-8-generic", "6.12.94", "6.1.0"] {
            assert!(!crashes(good), "{good}");
        }
    }

    #[test]
    fn running_out_of_devices_says_so() {
        let error = cannot_add(std::io::Error::from_raw_os_error(libc::EACCES));
        assert_eq!(error.kind(), burgeon_block::ErrorKind::NoSpace);
        assert!(error.to_string().contains("ublks_max"), "{error}");
    }
}
