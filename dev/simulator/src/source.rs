//! A source that answers late, wrongly or not at all, and keeps account of it.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use burgeon_block::{BlockSource, ByteRange, Digest, Error, ErrorKind, ObjectId, Result};
use burgeon_image::{AddressMap, Chunk, decode_chunk};
use bytes::Bytes;
use testkit::Rng;

use crate::{Model, model::THROUGH};

/// Behaviour of a source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mood {
    /// Right answers, after a while.
    Calm,
    /// Errors now and then, and at most one wrong answer before a right one: nothing that a
    /// reader must notice.
    Flaky,
    /// Anything.
    Hostile,
    /// Errors only.
    Dead,
}

/// The actions of a source, which the volume's counters must match.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct SourceLog {
    /// Right chunks, or right answers of objects that are read straight through, that reached the
    /// volume.
    pub(crate) good: u64,
    /// Bytes of answers of the length asked for.
    pub(crate) bytes: u64,
    /// Errors, wrong lengths and silences.
    pub(crate) errors: u64,
    /// The same with wrong bytes of the right length.
    pub(crate) lies: u64,
    /// Requests to objects that are read straight through that were dropped unanswered: by a volume
    /// at its deadline, or with a reader that gave up.
    pub(crate) dropped: u64,
    /// Two readers asked for one chunk at a time.
    pub(crate) doubled: bool,
}

/// A simulated source; clones are the same one.
#[derive(Clone)]
pub struct FaultySource(Arc<Mutex<State>>);

struct State {
    rng: Rng,
    mood: Mood,
    objects: HashMap<ObjectId, Vec<u8>>,
    map: Arc<AddressMap>,
    /// Questions whose last answer was a wrong one.
    wrong: HashSet<(ObjectId, ByteRange)>,
    /// Chunks.
    under_way: HashSet<ByteRange>,
    log: SourceLog,
}

enum Answer {
    Good,
    Error(ErrorKind),
    Shorter,
    Longer,
    WrongBit,
    /// Bytes of another place, as an object that was replaced would give.
    Stale,
    Silence,
}

impl FaultySource {
    /// A calm source of `model`'s objects.
    pub fn new(seed: u64, model: &Model) -> Self {
        Self(Arc::new(Mutex::new(State {
            rng: Rng::new(seed),
            mood: Mood::Calm,
            objects: model.objects.iter().cloned().collect(),
            map: Arc::clone(&model.map),
            wrong: HashSet::new(),
            under_way: HashSet::new(),
            log: SourceLog::default(),
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes its behaviour from now on.
    pub fn set_mood(&self, mood: Mood) {
        self.state().mood = mood;
    }

    pub(crate) fn mood(&self) -> Mood {
        self.state().mood
    }

    pub(crate) fn log(&self) -> SourceLog {
        self.state().log
    }
}

impl State {
    fn choose(&mut self, object: &ObjectId, question: ByteRange) -> Answer {
        let through = object.as_str() == THROUGH;
        let roll = self.rng.below(100);
        match (self.mood, roll) {
            (Mood::Calm, _) => Answer::Good,
            (Mood::Dead, _) => Answer::Error(ErrorKind::Unavailable),
            (Mood::Flaky, 0..20) => Answer::Error(ErrorKind::Unavailable),
            // Readers of one range of a file share no fetch: a second wrong answer to one of
            // them could be the second to the same.
            (Mood::Flaky, 20..50)
                if !through && !self.wrong.contains(&(object.clone(), question)) =>
            {
                self.wrong_answer(roll)
            }
            (Mood::Hostile, 0..10) => Answer::Error(ErrorKind::Unavailable),
            (Mood::Hostile, 10..15) => Answer::Silence,
            (Mood::Hostile, 15..65) => self.wrong_answer(roll),
            _ => Answer::Good,
        }
    }

    fn wrong_answer(&mut self, roll: u64) -> Answer {
        match roll % 6 {
            0 => Answer::Error(ErrorKind::NotFound),
            1 => Answer::Error(ErrorKind::LocalIo),
            2 => Answer::Shorter,
            3 => Answer::Longer,
            4 => Answer::Stale,
            _ => Answer::WrongBit,
        }
    }

    fn good(&self, object: &ObjectId, question: ByteRange) -> Option<Vec<u8>> {
        let bytes = self.objects.get(object)?;
        bytes.get(question.start() as usize..question.end() as usize).map(<[u8]>::to_vec)
    }

    fn stale(&mut self, object: &ObjectId, question: ByteRange) -> Vec<u8> {
        let len = question.len() as usize;
        let bytes = self.objects.get(object).map_or(&[][..], Vec::as_slice);
        let start = self.rng.below((bytes.len() - len) as u64 + 1) as usize;
        bytes[start..start + len].to_vec()
    }

    /// The chunks that a question is for.
    fn chunks(&self, question: ByteRange) -> impl Iterator<Item = Chunk> {
        let chunks = (0..self.map.chunk_count()).map(|index| self.map.chunk(index));
        chunks.filter(move |chunk| chunk.object == 0 && question.covers(chunk.stored))
    }

    /// Number of right and of wrong parts of `answer`: chunks, or all of it where it is read
    /// straight through. A flipped bit may be one that no decoder looks at.
    fn judge(&self, object: &ObjectId, question: ByteRange, answer: &[u8]) -> (u64, u64) {
        if object.as_str() == THROUGH {
            let right = self.good(object, question).as_deref() == Some(answer);
            return (right.into(), (!right).into());
        }
        let is_right = |chunk: &Chunk| {
            let at = (chunk.stored.start() - question.start()) as usize;
            let stored = &answer[at..][..chunk.stored.len() as usize];
            let mut raw = vec![0; chunk.range.len() as usize];
            decode_chunk(chunk.codec, stored, &mut raw, &chunk.digest).is_ok()
        };
        let (right, wrong): (Vec<_>, Vec<_>) = self.chunks(question).partition(is_right);
        (right.len() as u64, wrong.len() as u64)
    }

    /// True if a source that verifies its answers notices that it would lie.
    fn lies(&self, object: &ObjectId, question: ByteRange, answer: &[u8]) -> bool {
        let right_len = answer.len() as u64 == question.len();
        self.map.lacks_checksums()
            && right_len
            && self.good(object, question).as_deref() != Some(answer)
    }

    /// Notes an answer that now reaches the volume.
    fn deliver(&mut self, object: &ObjectId, question: ByteRange, answer: &Result<Bytes>) {
        let right_len = answer.as_ref().is_ok_and(|bytes| bytes.len() as u64 == question.len());
        match answer {
            Ok(bytes) if right_len => {
                self.log.bytes += question.len();
                let (right, wrong) = self.judge(object, question, bytes);
                self.log.good += right;
                self.log.lies += wrong;
                if wrong == 0 {
                    self.wrong.remove(&(object.clone(), question));
                    return;
                }
            }
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                self.log.errors += 1;
                return;
            }
            _ => self.log.errors += 1,
        }
        self.wrong.insert((object.clone(), question));
    }
}

/// A question under way; dropped with the future that asked it.
struct Asking<'a> {
    source: &'a FaultySource,
    question: ByteRange,
    shared: bool,
    /// True if no answer has come yet.
    silent: bool,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let mut state = self.source.state();
        if self.shared {
            let chunks: Vec<_> = state.chunks(self.question).map(|chunk| chunk.stored).collect();
            for chunk in chunks {
                state.under_way.remove(&chunk);
            }
        }
        // The volume has lost patience.
        let silences = if self.shared { &mut state.log.errors } else { &mut state.log.dropped };
        *silences += u64::from(self.silent);
    }
}

impl BlockSource for FaultySource {
    async fn read(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        let through = object.as_str() == THROUGH;
        let (answer, delay) = {
            let mut state = self.state();
            if !through {
                let chunks: Vec<_> = state.chunks(range).map(|chunk| chunk.stored).collect();
                for chunk in chunks {
                    state.log.doubled |= !state.under_way.insert(chunk);
                }
            }
            let delay = Duration::from_micros(state.rng.below(20_000));
            (state.choose(object, range), delay)
        };
        let mut asking = Asking { source: self, question: range, shared: !through, silent: true };
        tokio::time::sleep(delay).await;
        if matches!(answer, Answer::Silence) {
            std::future::pending::<()>().await;
        }
        asking.silent = false;
        let mut state = self.state();
        let missing = || Error::new(ErrorKind::NotFound, format!("no {range} in {object}"));
        let mut good = state.good(object, range).ok_or_else(missing)?;
        let answer = match answer {
            Answer::Error(kind) => Err(Error::new(kind, "simulated: the source fails")),
            Answer::Good | Answer::Silence => Ok(good),
            Answer::Shorter => {
                good.truncate(state.rng.below(range.len()) as usize);
                Ok(good)
            }
            Answer::Longer => {
                good.push(0);
                Ok(good)
            }
            Answer::WrongBit => {
                let at = state.rng.below(range.len()) as usize;
                good[at] ^= 1 << state.rng.below(8);
                Ok(good)
            }
            Answer::Stale => Ok(state.stale(object, range)),
        };
        let answer = match answer {
            Ok(bytes) if state.lies(object, range, &bytes) => {
                Err(Error::new(ErrorKind::Corrupt, "simulated: the source has found it wrong"))
            }
            answer => answer,
        };
        let answer = answer.map(Bytes::from);
        state.deliver(object, range, &answer);
        drop(state);
        answer
    }

    async fn identity(&self, object: &ObjectId, range: ByteRange) -> Result<Option<Digest>> {
        let state = self.state();
        let is_verified = state.map.lacks_checksums() && object.as_str() != THROUGH;
        Ok(state.good(object, range).filter(|_| is_verified).map(|bytes| Digest::of(&bytes)))
    }
}
