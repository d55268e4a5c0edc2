//! A server that demands tokens, in front of a registry that does not.
//!
//! ```text
//!   GET /v2/… ──► 401, Bearer realm=…/token      GET /token, user and password ──► a token
//!   the same with the token ──► the registry     so often, and then it has expired
//!                                                POST /token, identity token ──► a token
//! ```

use std::{
    io::{self, BufReader, Write},
    net::{SocketAddr, TcpStream},
    sync::{Arc, Mutex, PoisonError},
};

use super::{front::Front, head::Head};

/// The gate. It ends when dropped.
pub struct TokenGate {
    front: Front,
    state: Arc<Mutex<State>>,
}

struct State {
    /// `Authorization` of a request that gets a token; empty if every request gets one. With an
    /// identity token: `Identity` and the token.
    password: String,
    /// True if all objects are missing for clients without a token.
    hides: bool,
    /// Requests that a token is good for.
    uses: u64,
    tokens: u64,
    /// The rest of the last one.
    left: u64,
    scopes: Vec<String>,
}

impl TokenGate {
    /// A gate before `server`. It wants `basic`, which is `user:password` in base 64, for a
    /// token, which is good for `uses` requests.
    pub fn new(server: SocketAddr, basic: &str, uses: u64) -> io::Result<Self> {
        Self::start(server, format!("Basic {basic}"), uses, false)
    }

    /// A gate before `server` that wants the identity token `identity` for a token, which is good
    /// for `uses` requests.
    pub fn for_identity(server: SocketAddr, identity: &str, uses: u64) -> io::Result<Self> {
        Self::start(server, format!("Identity {identity}"), uses, false)
    }

    /// A gate that gives anybody a token; without one it demands one, or `hides` all objects.
    pub fn for_anybody(server: SocketAddr, uses: u64, hides: bool) -> io::Result<Self> {
        Self::start(server, String::new(), uses, hides)
    }

    fn start(server: SocketAddr, password: String, uses: u64, hides: bool) -> io::Result<Self> {
        let state = Arc::new(Mutex::new(State {
            password,
            hides,
            uses,
            tokens: 0,
            left: 0,
            scopes: Vec::new(),
        }));
        let shared = Arc::clone(&state);
        let front = Front::start(move |client, own| serve(&client, server, own, &shared))?;
        Ok(Self { front, state })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.front.address()
    }

    /// Tokens that were given out.
    pub fn tokens(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).tokens
    }

    /// The requested scopes.
    pub fn scopes(&self) -> Vec<String> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).scopes.clone()
    }

    /// From now on it wants another password, and no token is good any more.
    pub fn change(&self, basic: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.password, state.left) = (format!("Basic {basic}"), 0);
    }
}

fn serve(
    client: &TcpStream,
    server: SocketAddr,
    own: SocketAddr,
    state: &Mutex<State>,
) -> io::Result<()> {
    let mut client = client;
    let mut reader = BufReader::new(client.try_clone()?);
    let Some(mut request) = Head::read(&mut reader)? else { return Ok(()) };
    if request.get("expect").is_some() {
        client.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
    }
    let body = request.body(&mut reader, false)?;
    let said = request.get("authorization").unwrap_or_default();
    let form = String::from_utf8_lossy(&body);
    let answer = {
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(query) = request.second().strip_prefix("/token") {
            let posted = request.method() == "POST";
            let field = |name: &str| form.split('&').find_map(|pair| pair.strip_prefix(name));
            let identity = field("refresh_token=").unwrap_or_default();
            let refreshes = posted && field("grant_type=") == Some("refresh_token");
            let is_good = match refreshes {
                true => format!("Identity {identity}") == state.password,
                false => !posted && said == state.password,
            };
            if is_good {
                let query = if posted { &*form } else { query };
                (state.tokens, state.left) = (state.tokens + 1, state.uses);
                state
                    .scopes
                    .push(query.replace("%3A", ":").replace("%2F", "/").replace("%2C", ","));
                let token = format!("{{\"token\": \"number-{}\"}}", state.tokens);
                Some(("200 OK", String::new(), token))
            } else {
                Some(("401 Unauthorized", String::new(), "{}".to_owned()))
            }
        } else if said == format!("Bearer number-{}", state.tokens) && state.left > 0 {
            state.left -= 1;
            None
        } else if state.hides && request.second() != "/v2/" {
            Some(("404 Not Found", String::new(), "{}".to_owned()))
        } else {
            let realm = format!("realm=\"http://{own}/token\",service=\"test\"");
            let header = format!("www-authenticate: Bearer {realm}\r\n");
            Some(("401 Unauthorized", header, "{}".to_owned()))
        }
    };
    if let Some((status, header, text)) = answer {
        let len = text.len();
        let head = format!(
            "HTTP/1.1 {status}\r\n{header}content-length: {len}\r\nconnection: close\r\n\r\n{text}"
        );
        return client.write_all(head.as_bytes());
    }
    request.headers.retain(|(name, _)| name != "authorization");
    request.set("connection", "close");
    let mut upstream = TcpStream::connect(server)?;
    upstream.write_all(&request.encode())?;
    upstream.write_all(&body)?;
    io::copy(&mut upstream, &mut client).map(drop)
}
