set local lock_timeout = '500ms';

drop index model_providers_one_default_idx;
