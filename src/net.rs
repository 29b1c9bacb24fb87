//! Where a request that a workspace has thought up may go: to public addresses only, unless the operator allows more (L-3).
//!
//! A name is judged by what it resolves to, and the connection is made to the very address that was judged, so an answer
//! that changes in between (DNS rebinding) changes nothing. Addresses that stand in the URL itself are never resolved:
//! whoever sends a request asks `check` first. Redirects are not followed here, and no proxy is asked, since a proxy
//! would resolve the name again. Requests to addresses that the operator has set do not come here.

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect::Policy;
use reqwest::{Client, ClientBuilder, Url};
use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

/// How far requests may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    Public,
    Everywhere,
}

/// Does not say which address it is: names of an inner network are not for its guests to look up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the address is not a public one, and http.allow_private_addresses is off")]
pub struct NotPublic;

impl Reach {
    /// `allowed` is `http.allow_private_addresses`.
    pub fn with_private(allowed: bool) -> Self {
        match allowed {
            true => Self::Everywhere,
            false => Self::Public,
        }
    }

    /// Where the URL names an address instead of a host.
    pub fn check(self, url: &Url) -> Result<(), NotPublic> {
        let host = url.host_str().unwrap_or_default();
        let address = host.trim_start_matches('[').trim_end_matches(']').parse();
        match (self, address) {
            (Self::Public, Ok(address)) if !is_public(address) => Err(NotPublic),
            (Self::Public | Self::Everywhere, _) => Ok(()),
        }
    }

    /// A client that connects to nothing else.
    pub fn client(self) -> ClientBuilder {
        self.client_by(Arc::new(System))
    }

    fn client_by(self, names: Arc<dyn Resolve>) -> ClientBuilder {
        let client = Client::builder().redirect(Policy::none());
        match self {
            Self::Everywhere => client.dns_resolver(names),
            Self::Public => client.no_proxy().dns_resolver(Arc::new(Public(names))),
        }
    }
}

/// Whether the request was not sent since its host has no public address.
pub fn is_refused(error: &reqwest::Error) -> bool {
    let mut cause = error.source();
    while let Some(error) = cause {
        if error.is::<NotPublic>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Names as this machine resolves them.
struct System;

impl Resolve for System {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let found: Vec<SocketAddr> = found.collect();
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

/// Leaves the public ones of what a name resolves to.
struct Public(Arc<dyn Resolve>);

impl Resolve for Public {
    fn resolve(&self, name: Name) -> Resolving {
        let resolving = self.0.resolve(name);
        Box::pin(async move {
            let found = resolving.await?;
            let public: Vec<_> = found.filter(|found| is_public(found.ip())).collect();
            if public.is_empty() {
                return Err(NotPublic.into());
            }
            Ok(Box::new(public.into_iter()) as Addrs)
        })
    }
}

/// Whether the address belongs to the internet at large, by the special-purpose registries of IANA. An address that
/// stands for one of version 4 is judged as that one.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => match embedded(address) {
            Some(address) => is_public_v4(address),
            None => is_public_v6(address),
        },
    }
}

/// Mapped (`::ffff:a.b.c.d`), or translated by NAT64.
fn embedded(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let [a, b, c, d, e, f, high, low] = address.segments();
    let is_translated = [a, b, c, d, e, f] == [0x64, 0xff9b, 0, 0, 0, 0];
    let translated = Ipv4Addr::from(u32::from(high) << 16 | u32::from(low));
    address
        .to_ipv4_mapped()
        .or(is_translated.then_some(translated))
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let within = |network: [u8; 4], bits: u32| {
        u32::from(address) >> (32 - bits) == u32::from(Ipv4Addr::from(network)) >> (32 - bits)
    };
    let is_special = within([0, 0, 0, 0], 8) // this host
        || within([10, 0, 0, 0], 8)
        || within([100, 64, 0, 0], 10) // carriers; a cloud's metadata at 100.100.100.200
        || within([127, 0, 0, 0], 8)
        || within([168, 63, 129, 16], 32) // a cloud's metadata, although registered as public
        || within([169, 254, 0, 0], 16) // link-local, most clouds' metadata among it
        || within([172, 16, 0, 0], 12)
        || within([192, 0, 0, 0], 24) // protocols
        || within([192, 0, 2, 0], 24) // documentation
        || within([192, 88, 99, 0], 24) // relays to version 6
        || within([192, 168, 0, 0], 16)
        || within([198, 18, 0, 0], 15) // benchmarks
        || within([198, 51, 100, 0], 24) // documentation
        || within([203, 0, 113, 0], 24) // documentation
        || within([224, 0, 0, 0], 3); // multicast, reserved, broadcast
    !is_special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let [first, second, ..] = address.segments();
    // Only these are given out: link-local, unique local, multicast and local NAT64 are all outside.
    let is_global = first & 0xe000 == 0x2000;
    let is_special = match first {
        0x2001 => second < 0x200 || second == 0xdb8, // protocols and tunnels, documentation
        0x2002 => true,                              // tunnels
        0x3fff => second < 0x1000,                   // documentation
        _ => false,
    };
    is_global && !is_special
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    // L-3
    #[test]
    fn only_addresses_of_the_internet_are_public() {
        for address in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "168.63.129.15",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "2606:4700::1111",
            "2001:200::",
            "2001:4860:4860::8888",
            "2003::",
            "3ffe:ffff::",
            "3fff:1000::",
            "::ffff:8.8.8.8",
            "64:ff9b::8.8.8.8",
        ] {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
        for address in [
            "0.0.0.0",
            "0.255.255.255",
            "10.0.0.0",
            "10.255.255.255",
            "100.64.0.0",
            "100.100.100.200",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.255",
            "168.63.129.16",
            "169.254.0.0",
            "169.254.169.254",
            "169.254.255.255",
            "172.16.0.0",
            "172.31.255.255",
            "192.0.0.192",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.0.0",
            "192.168.255.255",
            "198.18.0.0",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::8.8.8.8",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::ffff:0:8.8.8.8",
            "64:ff9b::10.0.0.1",
            "64:ff9b::169.254.169.254",
            "64:ff9b:0:1::8.8.8.8",
            "64:ff9b:1::8.8.8.8",
            "100::1",
            "2001::1",
            "2001:2::1",
            "2001:20::1",
            "2001:1ff:ffff::",
            "2001:db8::1",
            "2002:7f00:1::",
            "3fff:fff::1",
            "4000::1",
            "5f00::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "febf::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
    }

    // L-3: an address in a URL is judged however it is written.
    #[test]
    fn an_address_in_a_url_is_judged_as_it_is_connected_to() {
        let check = |reach: Reach, url: &str| reach.check(&Url::parse(url).unwrap());
        for url in [
            "http://127.0.0.1:80/",
            "http://2130706433/",
            "http://0x7f.1/",
            "http://0177.0.0.1/",
            "http://127.1/",
            "http://[::1]/",
            "http://[::ffff:10.0.0.1]:8080/",
            "http://169.254.169.254./",
        ] {
            assert_eq!(check(Reach::Public, url), Err(NotPublic), "{url}");
            assert_eq!(check(Reach::Everywhere, url), Ok(()), "{url}");
        }
        for url in ["http://1.1.1.1/", "http://[2606:4700::1111]/", "http://h/"] {
            assert_eq!(check(Reach::Public, url), Ok(()), "{url}");
        }
    }

    /// Gives these answers in turn, each time another one.
    struct Changing(Vec<Vec<IpAddr>>, AtomicUsize);

    impl Resolve for Changing {
        fn resolve(&self, _: Name) -> Resolving {
            let at = self.1.fetch_add(1, Ordering::SeqCst);
            let answer = self.0[at].clone();
            let answer = answer.into_iter().map(|ip| SocketAddr::new(ip, 0));
            Box::pin(async move { Ok(Box::new(answer) as Addrs) })
        }
    }

    fn names(answers: &[&[&str]]) -> Arc<Changing> {
        let answer = |list: &&[&str]| list.iter().map(|ip| ip.parse().unwrap()).collect();
        Arc::new(Changing(answers.iter().map(answer).collect(), 0.into()))
    }

    // L-3: what was judged is what is connected to: the name is asked for once.
    #[tokio::test]
    async fn a_name_is_judged_by_what_it_resolves_to() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!(
            "http://inside.example:{}/",
            listener.local_addr().unwrap().port()
        );
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 1024]).await.unwrap();
            // Where a redirect leads is not asked, either.
            let answer = "HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n";
            stream.write_all(answer.as_bytes()).await.unwrap();
        });
        let rebinding = names(&[&["127.0.0.1"], &["8.8.8.8"]]);
        for refused in [
            names(&[&["127.0.0.1", "fd00::1"]]),
            names(&[&[]]),
            rebinding,
        ] {
            let client = Reach::Public.client_by(refused.clone()).build().unwrap();
            let error = client.get(&url).send().await.unwrap_err();
            assert!(is_refused(&error), "{error:?}");
            assert_eq!(refused.1.load(Ordering::SeqCst), 1);
        }
        assert!(!server.is_finished(), "nobody has come");
        let local = names(&[&["127.0.0.1"]]);
        let client = Reach::Everywhere.client_by(local).build().unwrap();
        assert_eq!(client.get(&url).send().await.unwrap().status(), 302);
        server.await.unwrap();
    }

    // L-3: of several addresses only the public ones are tried.
    #[tokio::test]
    async fn private_addresses_of_a_public_name_are_left_out() {
        let mixed = names(&[&["10.0.0.1", "1.1.1.1", "::1"]]);
        let found = Public(mixed).resolve("h".parse().unwrap()).await;
        let found: Vec<_> = found.ok().unwrap().map(|found| found.ip()).collect();
        assert_eq!(found, ["1.1.1.1".parse::<IpAddr>().unwrap()]);
    }
}
