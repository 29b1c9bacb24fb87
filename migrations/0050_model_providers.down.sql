set local lock_timeout = '500ms';

drop table model_providers;
