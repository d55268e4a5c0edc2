//! The way of a serving process to the driver: with its own rights, or by controls that it has made
//! before it gave them up. Then another process opens devices for it.
//!
//! ```text
//!   Driver::confined ─► rings for one file, /dev/ublk-control, with the credentials of that moment
//!   the process drops CAP_SYS_ADMIN
//!   Driver::with ─► a free ring ─► the kernel sees the credentials in it ─► command
//! ```
//!
//! The kernel restricts such a ring to commands for that file, not to certain devices or commands:
//! its owner can stop and remove ublk devices of others, and nothing else of an administrator.

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::AsRawFd,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind, Result};
use io_uring::{IoUring, cqueue, opcode::UringCmd80, register::Restriction, squeue};

use super::control::{self, Control};
use crate::sys::failed;

/// Commands at a time. One may take as long as the kernel likes, as the end of a device does.
const CONTROLS: usize = 4;
/// Limit for a command to wait for earlier ones, which have a limit, too.
const PATIENCE: Duration = Duration::from_secs(60);
/// Limit for the end of a process that has the device open.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// The way to the driver, for [`serve`](super::serve).
pub struct Driver {
    controls: Option<Pool>,
    open: OpenDevice,
}

/// Opens `/dev/ublkcN` for reading and writing. Also returns the process that has opened it.
pub type OpenDevice = Box<dyn Fn(u32) -> io::Result<(File, u32)> + Send + Sync>;

/// Controls that are made once, and used in turn.
struct Pool {
    free: Mutex<Vec<Control>>,
    returned: Condvar,
}

impl Driver {
    /// With the rights of this process, which must be an administrator's at each command.
    pub fn direct() -> Self {
        Self { controls: None, open: Box::new(open_device) }
    }

    /// With the present rights of this process. Starts no thread, and gives no command: an
    /// unsuitable driver fails at the first one.
    pub fn confined() -> Result<Self> {
        let free =
            (0..CONTROLS).map(|_| confine(control::open_driver()?)).collect::<Result<_>>()?;
        let pool = Pool { free: Mutex::new(free), returned: Condvar::new() };
        Ok(Self { controls: Some(pool), ..Self::direct() })
    }

    /// Has devices opened by `open` from now on.
    pub fn opened_by(self, open: OpenDevice) -> Self {
        Self { open, ..self }
    }

    /// Ends the block device `number`, as [`Control::stop`].
    pub fn stop(&self, number: u32) -> Result<()> {
        self.with(|control| control.stop(number))
    }

    /// The size in bytes of the device `number`.
    pub fn size(&self, number: u32) -> Result<u64> {
        self.with(|control| control.size(number))
    }

    /// Opens `/dev/ublkcN`, which one process at a time can have. Waits for one that is just
    /// ending. Also returns the process that has opened it.
    pub(super) fn open(&self, number: u32) -> Result<(File, u32)> {
        let begun = Instant::now();
        loop {
            match (self.open)(number) {
                Ok(opened) => return Ok(opened),
                Err(e)
                    if e.raw_os_error() == Some(libc::EBUSY) && begun.elapsed() < OPEN_TIMEOUT =>
                {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(e) => {
                    let path = control::char_path(number);
                    return Err(failed(format!("cannot open {}", path.display()), e));
                }
            }
        }
    }

    /// Calls `use_it` with a control. `Unavailable` if none gets free.
    pub(super) fn with<T>(&self, use_it: impl FnOnce(&mut Control) -> Result<T>) -> Result<T> {
        let Some(pool) = &self.controls else { return use_it(&mut Control::open()?) };
        let mut control = pool.take()?;
        let done = use_it(&mut control);
        pool.free().push(control);
        pool.returned.notify_one();
        done
    }
}

impl Pool {
    fn take(&self) -> Result<Control> {
        let none_free = |free: &mut Vec<Control>| free.is_empty();
        let (mut free, _) = self
            .returned
            .wait_timeout_while(self.free(), PATIENCE, none_free)
            .unwrap_or_else(PoisonError::into_inner);
        free.pop().ok_or_else(|| {
            let what = "earlier commands to the ublk driver have not ended";
            Error::new(ErrorKind::Unavailable, what)
        })
    }

    fn free(&self) -> MutexGuard<'_, Vec<Control>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open_device(number: u32) -> io::Result<(File, u32)> {
    let file = OpenOptions::new().read(true).write(true).open(control::char_path(number))?;
    Ok((file, std::process::id()))
}

/// A control with the credentials of this moment, whose ring does nothing but commands to `file`.
fn confine(file: File) -> Result<Control> {
    let (ring, personality) =
        confined_ring(&file).map_err(|e| failed("cannot make an io_uring for the driver", e))?;
    Ok(Control::through(ring, personality))
}

fn confined_ring(file: &File) -> io::Result<(IoUring<squeue::Entry128, cqueue::Entry>, u16)> {
    let ring = IoUring::builder().setup_r_disabled().build(4)?;
    let submitter = ring.submitter();
    submitter.register_files(&[file.as_raw_fd()])?;
    let personality = submitter.register_personality()?;
    // Where no registration is named, later kernels permit all of them, that of other files among
    // them. This one only tells what the kernel can do.
    const REGISTER_PROBE: u8 = 8;
    submitter.register_restrictions(&mut [
        Restriction::sqe_op(UringCmd80::CODE),
        Restriction::sqe_flags_required(squeue::Flags::FIXED_FILE.bits()),
        Restriction::register_op(REGISTER_PROBE),
    ])?;
    submitter.register_enable_rings()?;
    Ok((ring, personality))
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::AsRawFd};

    use io_uring::{
        opcode::{Nop, OpenAt, UringCmd80},
        squeue::{Entry128, Flags},
        types::{Fd, Fixed},
    };

    use super::confined_ring;

    /// The result of `entry` in a ring that is confined to `/dev/null`.
    fn result(entry: impl FnOnce(&File) -> Entry128) -> i32 {
        let file = File::open("/dev/null").unwrap();
        let (mut ring, personality) = confined_ring(&file).unwrap();
        let entry = entry(&file).personality(personality);
        // SAFETY: the entries of these tests name no memory but a static path.
        unsafe { ring.submission().push(&entry) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    }

    #[test]
    fn a_confined_ring_takes_commands_to_its_file_alone() {
        let refused = -libc::EACCES;
        assert_ne!(result(|_| UringCmd80::new(Fixed(0), 0).build()), refused);
        assert_eq!(result(|file| UringCmd80::new(Fd(file.as_raw_fd()), 0).build()), refused);
        // With the flag that every permitted one has.
        let flag = Flags::FIXED_FILE;
        let open = OpenAt::new(Fd(libc::AT_FDCWD), c"/dev/null".as_ptr()).build();
        assert_eq!(result(|_| open.flags(flag).into()), refused);
        assert_eq!(result(|_| Nop::new().build().flags(flag).into()), refused);
    }

    #[test]
    fn a_confined_ring_takes_no_other_file_and_no_other_credentials() {
        let file = File::open("/dev/null").unwrap();
        let (ring, _) = confined_ring(&file).unwrap();
        let submitter = ring.submitter();
        let refused = |done: std::io::Result<()>| {
            assert_eq!(done.unwrap_err().raw_os_error(), Some(libc::EACCES));
        };
        refused(submitter.register_files_update(0, &[file.as_raw_fd()]).map(drop));
        refused(submitter.unregister_files());
        refused(submitter.register_personality().map(drop));
    }
}
