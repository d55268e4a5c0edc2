//! Listens in front of a server, with a thread for each connection.

use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

/// A port of this machine where connections are taken. It is closed when dropped.
pub(super) struct Front {
    address: SocketAddr,
    ended: Arc<AtomicBool>,
}

impl Front {
    /// Gives each connection to `serve`, with the address that it came to.
    pub(super) fn start(
        serve: impl Fn(TcpStream, SocketAddr) -> io::Result<()> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let (serve, ended) = (Arc::new(serve), Arc::new(AtomicBool::new(false)));
        let over = Arc::clone(&ended);
        thread::spawn(move || {
            for client in listener.incoming() {
                if over.load(Relaxed) {
                    break;
                }
                let Ok(client) = client else { continue };
                let serve = Arc::clone(&serve);
                // After any error here, the client sees a broken connection.
                thread::spawn(move || drop(serve(client, address)));
            }
        });
        Ok(Self { address, ended })
    }

    /// The address it listens on.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.ended.store(true, Relaxed);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
    }
}
