//! A ublk device of zeros with queues of one's choice: for `xtask bench --only ublk-queues`, and
//! for `fio` by hand. As root, on a kernel with `ublk_drv`:
//!
//! ```text
//! cargo run --release -p burgeon-frontend --example ublk_zeros -- QUEUES DEPTH
//! ```
//!
//! It prints the device's path, serves until its input ends, and leaves nothing behind.

use std::{error, io, sync::Arc};

use burgeon_block::{BlockDevice, Now, Result, Shape};
use burgeon_frontend::{
    ServeOptions, Slots,
    ublk::{self, Control, Queues},
};

const SIZE: u64 = 250 << 30;
const OWNER: u64 = 0;

struct Zeros;

impl BlockDevice for Zeros {
    fn shape(&self) -> Shape {
        Shape::read_only(SIZE)
    }

    fn try_read(&self, _offset: u64, buf: &mut [u8]) -> Result<Now> {
        buf.fill(0);
        Ok(Now::Served)
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.try_read(offset, buf).map(drop)
    }
}

fn main() -> std::result::Result<(), Box<dyn error::Error>> {
    let number = |index| -> std::result::Result<u16, Box<dyn error::Error>> {
        let argument = std::env::args().nth(index).ok_or("say how many QUEUES and which DEPTH")?;
        Ok(argument.parse()?)
    };
    let queues = Queues { count: number(1)?, depth: number(2)? };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build()?;
    let options = ServeOptions::new(runtime.handle().clone());
    let slots = Arc::new(Slots::create()?);
    let mut control = Control::open()?;
    let device = control.add(&Shape::read_only(SIZE), OWNER, queues)?.number;
    let server = ublk::serve(device, slots.clone(), Arc::new(Zeros), &options)?;
    println!("{}", control.start(device, std::process::id())?.display());

    io::copy(&mut io::stdin(), &mut io::sink())?;
    control.stop(device)?;
    drop(server);
    control.remove(device)?;
    Ok(())
}
