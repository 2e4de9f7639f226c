//! From an address and settings to a client. Settings given in code win over the environment.

use std::sync::Arc;

use object_store::{BackoffConfig, ObjectStore, RetryConfig};

use crate::{Address, Operation, Result, Scheme, StorageError, StoreOptions};

pub(super) fn connect(address: &Address, options: &StoreOptions) -> Result<Arc<dyn ObjectStore>> {
    match address.scheme() {
        #[cfg(feature = "s3")]
        Scheme::S3 => s3(address, options),
        #[cfg(feature = "gs")]
        Scheme::Gcs => gs(address, options),
        #[cfg(feature = "az")]
        Scheme::Azure => az(address, options),
        #[cfg(feature = "http")]
        Scheme::Http => http(address, options),
        scheme => Err(StorageError::NotBuilt { path: address.to_string(), scheme: format!("{scheme:?}") }),
    }
}

#[cfg(feature = "s3")]
fn s3(address: &Address, options: &StoreOptions) -> Result<Arc<dyn ObjectStore>> {
    use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(address.authority()).with_retry(retries(options));
    for (name, value) in &options.settings {
        builder = builder.with_config(setting::<AmazonS3ConfigKey>(address, name)?, value);
    }
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
    }
    if let Some(region) = &options.region {
        builder = builder.with_region(region);
    }
    let endpoint = builder
        .get_config_value(&AmazonS3ConfigKey::S3Endpoint)
        .or_else(|| builder.get_config_value(&AmazonS3ConfigKey::Endpoint));
    if let Some(allow) = plain_http(options, endpoint.as_deref()) {
        builder = builder.with_allow_http(allow);
    }
    built(address, builder.build())
}

#[cfg(feature = "gs")]
fn gs(address: &Address, options: &StoreOptions) -> Result<Arc<dyn ObjectStore>> {
    use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
    let mut builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(address.authority()).with_retry(retries(options));
    for (name, value) in &options.settings {
        builder = builder.with_config(setting::<GoogleConfigKey>(address, name)?, value);
    }
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_config(GoogleConfigKey::BaseUrl, endpoint);
    }
    if let Some(allow) = plain_http(options, options.endpoint.as_deref()) {
        builder = builder.with_client_options(object_store::ClientOptions::new().with_allow_http(allow));
    }
    built(address, builder.build())
}

#[cfg(feature = "az")]
fn az(address: &Address, options: &StoreOptions) -> Result<Arc<dyn ObjectStore>> {
    use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
    let mut builder = MicrosoftAzureBuilder::from_env().with_container_name(address.authority()).with_retry(retries(options));
    for (name, value) in &options.settings {
        builder = builder.with_config(setting::<AzureConfigKey>(address, name)?, value);
    }
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(endpoint.clone());
    }
    let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
    if let Some(allow) = plain_http(options, endpoint.as_deref()) {
        builder = builder.with_allow_http(allow);
    }
    built(address, builder.build())
}

#[cfg(feature = "http")]
fn http(address: &Address, options: &StoreOptions) -> Result<Arc<dyn ObjectStore>> {
    use object_store::ClientConfigKey;
    use object_store::http::HttpBuilder;
    // Only the server: the path is the prefix of every key.
    let text = address.to_string();
    let server = text.split('/').take(3).collect::<Vec<_>>().join("/");
    let mut client = object_store::ClientOptions::new();
    for (name, value) in &options.settings {
        client = client.with_config(setting::<ClientConfigKey>(address, name)?, value);
    }
    // Whoever wrote `http://` in the address has said so.
    client = client.with_allow_http(options.allow_http.unwrap_or_else(|| server.starts_with("http://")));
    built(address, HttpBuilder::new().with_url(server).with_client_options(client).with_retry(retries(options)).build())
}

fn built<S: ObjectStore>(address: &Address, made: object_store::Result<S>) -> Result<Arc<dyn ObjectStore>> {
    match made {
        Ok(client) => Ok(Arc::new(client)),
        Err(error) => Err(super::classify(Operation::Open, &address.to_string(), error)),
    }
}

fn setting<K: std::str::FromStr>(address: &Address, name: &str) -> Result<K> {
    name.to_ascii_lowercase().parse().map_err(|_| StorageError::Unsupported {
        path: address.to_string(),
        operation: Operation::Open,
        reason: format!("unknown setting {name:?}"),
    })
}

fn retries(options: &StoreOptions) -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig { init_backoff: options.retry.first_backoff, max_backoff: options.retry.max_backoff, base: 2.0 },
        max_retries: options.retry.max_retries,
        retry_timeout: options.retry.timeout,
    }
}

/// What the caller said; else yes for an endpoint on this machine, where nobody can listen in; else the environment.
#[cfg(any(feature = "s3", feature = "gs", feature = "az"))]
fn plain_http(options: &StoreOptions, endpoint: Option<&str>) -> Option<bool> {
    options.allow_http.or_else(|| {
        let host = endpoint?.strip_prefix("http://")?.split('/').next()?;
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        matches!(name, "localhost" | "127.0.0.1" | "[::1]").then_some(true)
    })
}

#[cfg(all(test, feature = "s3"))]
mod tests {
    use super::*;

    #[test]
    fn plain_http_is_allowed_by_itself_only_on_this_machine() {
        let options = StoreOptions::default();
        assert_eq!(plain_http(&options, Some("http://127.0.0.1:9000")), Some(true));
        assert_eq!(plain_http(&options, Some("http://localhost/x")), Some(true));
        assert_eq!(plain_http(&options, Some("http://127.0.0.1.example.com:80")), None);
        assert_eq!(plain_http(&options, None), None);
        let refused = StoreOptions { allow_http: Some(false), ..StoreOptions::default() };
        assert_eq!(plain_http(&refused, Some("http://localhost")), Some(false));
    }

    #[test]
    fn a_setting_that_does_not_exist_is_named() {
        let address = Address::parse("s3://bucket").unwrap();
        let settings = vec![("no_such_thing".to_owned(), String::new())];
        let options = StoreOptions { settings, ..StoreOptions::default() };
        let error = connect(&address, &options).unwrap_err();
        assert!(error.to_string().contains("no_such_thing"), "{error}");
    }
}
