set local lock_timeout = '500ms';

drop table configured_tool_credentials;
drop table configured_tools;
