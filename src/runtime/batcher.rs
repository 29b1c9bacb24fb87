//! Group commit: callers hand in one item each and get one answer each; whatever has gathered while the last batch was
//! being written is written as the next one.

use std::future::Future;
use tokio::sync::{mpsc, oneshot};

/// Handle to a running batcher. Cheap to clone. When all handles are gone the batcher writes what it holds and ends.
pub struct Batcher<T, R> {
    queue: mpsc::Sender<(T, oneshot::Sender<R>)>,
}

impl<T, R> Clone for Batcher<T, R> {
    fn clone(&self) -> Self {
        Self {
            queue: self.queue.clone(),
        }
    }
}

impl<T: Send + 'static, R: Send + 'static> Batcher<T, R> {
    /// Starts the batcher. `write` gets 1 to `max` items and must answer each, in order.
    ///
    /// At most `writers` batches are written at the same time.
    pub fn start<F, W>(max: usize, writers: usize, write: F) -> Self
    where
        F: Fn(Vec<T>) -> W + Clone + Send + Sync + 'static,
        W: Future<Output = Vec<R>> + Send,
    {
        let (queue, inbox) = mpsc::channel::<(T, oneshot::Sender<R>)>(max * 4);
        let inbox = std::sync::Arc::new(tokio::sync::Mutex::new(inbox));
        for _ in 0..writers {
            let (inbox, write) = (inbox.clone(), write.clone());
            tokio::spawn(async move {
                loop {
                    let mut batch = Vec::new();
                    // The lock is held while waiting for a batch, never while writing one.
                    {
                        let mut inbox = inbox.lock().await;
                        if inbox.recv_many(&mut batch, max).await == 0 {
                            return;
                        }
                        gather(&mut inbox, &mut batch, max).await;
                    }
                    let (items, answers): (Vec<T>, Vec<_>) = batch.into_iter().unzip();
                    for (answer, result) in answers.into_iter().zip(write(items).await) {
                        // The caller may be gone; its item is written all the same.
                        let _ = answer.send(result);
                    }
                }
            });
        }
        Self { queue }
    }

    /// Hands in one item and waits for its answer. `None` when the writer has died, which is a bug in `write`.
    pub async fn submit(&self, item: T) -> Option<R> {
        let (answer, result) = oneshot::channel();
        self.queue.send((item, answer)).await.ok()?;
        result.await.ok()
    }
}

/// Lets callers that are at work at this moment come along. Work comes in bursts, and the first of a burst would
/// otherwise be written by itself. Takes no time when nothing else is ready to run.
async fn gather<T>(inbox: &mut mpsc::Receiver<T>, batch: &mut Vec<T>, max: usize) {
    for _ in 0..2 {
        tokio::task::yield_now().await;
        while batch.len() < max
            && let Ok(item) = inbox.try_recv()
        {
            batch.push(item);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn items_that_gather_are_written_together_and_each_gets_its_answer() {
        let (sizes, mut seen) = mpsc::unbounded_channel();
        let gate = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
        let open = gate.clone();
        let batcher = Batcher::start(10, 1, move |items: Vec<u32>| {
            let (sizes, gate) = (sizes.clone(), gate.clone());
            async move {
                sizes.send(items.len()).unwrap();
                gate.acquire().await.unwrap().forget();
                items.into_iter().map(|n| n * 2).collect()
            }
        });
        let first = tokio::spawn({
            let batcher = batcher.clone();
            async move { batcher.submit(1).await }
        });
        assert_eq!(seen.recv().await, Some(1));
        let rest: Vec<_> = (2..=5)
            .map(|n| {
                let batcher = batcher.clone();
                tokio::spawn(async move { batcher.submit(n).await })
            })
            .collect();
        while batcher.queue.capacity() > 36 {
            tokio::task::yield_now().await;
        }
        open.add_permits(2);
        assert_eq!(first.await.unwrap(), Some(2));
        for (n, answer) in (2..=5).zip(rest) {
            assert_eq!(answer.await.unwrap(), Some(n * 2));
        }
        assert_eq!(seen.recv().await, Some(4));
    }
}
