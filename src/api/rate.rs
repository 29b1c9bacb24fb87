//! How often somebody may ask (P-8): a workspace per minute, a source and an account at log-in.
//!
//! Each process counts for itself, in memory. A budget is a minute's worth and fills up evenly, so a caller who comes
//! back after `Retry-After` is served. The clock is handed in.

use super::error::Error;
use crate::config;
use crate::domain::ids::WorkspaceId;
use axum::extract::ConnectInfo;
use axum::http::request::Parts;
use std::collections::HashMap;
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const PERIOD: Duration = Duration::from_secs(60);
/// Keys that are not at rest. Whoever sends from more sources than this is refused with everybody who is new.
const KEYS_MAX: usize = 20_000;

/// One budget per key.
pub struct Limiter<K> {
    /// `None`: no limit.
    interval: Option<Duration>,
    /// When the budget of a key is whole again. At that time the key may be forgotten.
    whole_at: Mutex<HashMap<K, Instant>>,
}

impl<K: Hash + Eq> Limiter<K> {
    /// 0: no limit.
    pub fn per_minute(limit: u32) -> Self {
        Self {
            interval: PERIOD.checked_div(limit),
            whole_at: Mutex::default(),
        }
    }

    /// Takes one from the budget, or says how long to wait.
    pub fn admit(&self, key: K, now: Instant) -> Result<(), Duration> {
        let Some(interval) = self.interval else {
            return Ok(());
        };
        let mut whole_at = self.whole_at.lock().unwrap_or_else(PoisonError::into_inner);
        if whole_at.len() >= KEYS_MAX && !whole_at.contains_key(&key) {
            whole_at.retain(|_, at| *at > now);
            if whole_at.len() >= KEYS_MAX {
                return Err(interval);
            }
        }
        let at = whole_at.entry(key).or_insert(now);
        let next = (*at).max(now) + interval;
        match next.saturating_duration_since(now + PERIOD) {
            Duration::ZERO => {
                *at = next;
                Ok(())
            }
            wait => Err(wait),
        }
    }
}

/// Where a request comes from, as far as it can be known. An IPv6 subscriber has a whole /64, so that is one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source(Option<IpAddr>);

impl Source {
    /// The peer, or behind `trusted_proxies` proxies the address that the outermost of them has seen. What stands further
    /// to the left in `X-Forwarded-For` is the client's own claim.
    pub fn of(parts: &Parts, trusted_proxies: u32) -> Self {
        let peer = parts.extensions.get::<ConnectInfo<SocketAddr>>();
        let peer = peer.map(|ConnectInfo(address)| address.ip());
        if trusted_proxies == 0 {
            return Self(peer.map(of_subscriber));
        }
        let values = parts.headers.get_all("x-forwarded-for").iter();
        let hops: Vec<&str> = values
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .collect();
        let seen = hops.len().checked_sub(trusted_proxies as usize);
        let seen = seen.and_then(|at| hops[at].trim().parse::<IpAddr>().ok());
        Self(seen.or(peer).map(of_subscriber))
    }
}

fn of_subscriber(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}

/// The limits of this process.
pub struct Limits {
    workspaces: Limiter<WorkspaceId>,
    login_sources: Limiter<Source>,
    /// By slug and name as they were typed, whether or not there is such an account.
    login_accounts: Limiter<(String, String)>,
}

impl Limits {
    pub fn new(config: &config::Limits) -> Self {
        Self {
            workspaces: Limiter::per_minute(config.workspace_requests_per_minute),
            login_sources: Limiter::per_minute(config.login_attempts_per_source_per_minute),
            login_accounts: Limiter::per_minute(config.login_attempts_per_account_per_minute),
        }
    }

    pub fn admit_request(&self, workspace: WorkspaceId, now: Instant) -> Result<(), Error> {
        let refuse = |retry_after| Error::RateLimited {
            retry_after,
            of: "of this workspace",
        };
        self.workspaces.admit(workspace, now).map_err(refuse)
    }

    pub fn admit_login(
        &self,
        source: Source,
        slug: &str,
        username: &str,
        now: Instant,
    ) -> Result<(), Error> {
        let refuse = |of| move |retry_after| Error::RateLimited { retry_after, of };
        self.login_sources
            .admit(source, now)
            .map_err(refuse("to log in from here"))?;
        let account = (slug.to_owned(), username.to_ascii_lowercase());
        self.login_accounts
            .admit(account, now)
            .map_err(refuse("to log in to this account"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    // P-8
    #[test]
    fn a_budget_is_a_minutes_worth_and_fills_evenly() {
        let limiter = Limiter::per_minute(6);
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        for _ in 0..6 {
            assert_eq!(limiter.admit("a", at(0)), Ok(()));
        }
        assert_eq!(limiter.admit("a", at(0)), Err(Duration::from_secs(10)));
        assert_eq!(limiter.admit("b", at(0)), Ok(()), "each has its own");
        assert_eq!(limiter.admit("a", at(9)), Err(Duration::from_secs(1)));
        assert_eq!(limiter.admit("a", at(10)), Ok(()), "who waits is served");
        assert_eq!(limiter.admit("a", at(10)), Err(Duration::from_secs(10)));
        for _ in 0..6 {
            assert_eq!(limiter.admit("a", at(100)), Ok(()));
        }
        assert!(
            limiter.admit("a", at(100)).is_err(),
            "it holds no more than a minute's worth"
        );
        let unlimited = Limiter::per_minute(0);
        assert!((0..1000).all(|_| unlimited.admit("a", start).is_ok()));
    }

    // bounded, whatever keys come.
    #[test]
    fn only_those_who_have_asked_lately_are_remembered() {
        let limiter = Limiter::per_minute(60);
        let start = Instant::now();
        for key in 0..KEYS_MAX {
            assert_eq!(limiter.admit(key, start), Ok(()));
        }
        assert!(limiter.admit(KEYS_MAX, start).is_err());
        assert_eq!(
            limiter.admit(0, start),
            Ok(()),
            "who is known is counted on"
        );
        assert_eq!(
            limiter.admit(KEYS_MAX, start + Duration::from_secs(1)),
            Ok(())
        );
        assert_eq!(limiter.whole_at.lock().unwrap().len(), 2);
    }

    // P-8: nobody chooses their own source.
    #[test]
    fn a_source_is_what_a_trusted_proxy_has_seen() {
        let source = |peer: &str, forwarded: &[&str], proxies: u32| {
            let mut request = Request::get("/");
            for value in forwarded {
                request = request.header("x-forwarded-for", *value);
            }
            let (mut parts, ()) = request.body(()).unwrap().into_parts();
            let peer = SocketAddr::new(peer.parse().unwrap(), 1);
            parts.extensions.insert(ConnectInfo(peer));
            Source::of(&parts, proxies).0.unwrap().to_string()
        };
        let two = ["6.6.6.6, 5.5.5.5", "4.4.4.4"];
        for (peer, forwarded, proxies, expected) in [
            ("10.0.0.1", &[][..], 0, "10.0.0.1"),
            ("10.0.0.1", &two[..], 0, "10.0.0.1"),
            ("10.0.0.1", &two[..], 1, "4.4.4.4"),
            ("10.0.0.1", &two[..], 2, "5.5.5.5"),
            ("10.0.0.1", &two[..], 4, "10.0.0.1"),
            ("10.0.0.1", &["nobody"][..], 1, "10.0.0.1"),
            ("::ffff:10.0.0.1", &[][..], 0, "10.0.0.1"),
            ("2001:db8:1:2:3:4:5:6", &[][..], 0, "2001:db8:1:2::"),
        ] {
            assert_eq!(
                source(peer, forwarded, proxies),
                expected,
                "{forwarded:?} {proxies}"
            );
        }
    }
}
